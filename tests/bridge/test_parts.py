"""What the bridge is made of: experts behind the interface, results joined late, files through transformers' conversions, skeletons on no memory."""

import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.integrations.moe import batched_mm_experts_forward

import hetero
from cpu_kernels import ExpertStore
from cpu_kernels.team import Team
from hetero.arch import families, spec, tensors
from hetero.bridge import known, skeleton
from hetero.bridge.routed import Computed, Pending
from hetero.errors import BadCheckpoint, BadOption, UnsupportedModel
from hetero.forecast import forecast
from hetero.model.experts import expert_layer
from hetero.options import Options
from hetero.weights.source import EMBEDDED

place = importlib.util.spec_from_file_location("bridged", pathlib.Path(__file__).resolve().parent / "bridged.py")
tiny = importlib.util.module_from_spec(place)
place.loader.exec_module(tiny)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("bridged")
    tiny.save(tiny.build("AfmoeForCausalLM")[1], path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, path)
    return path


def opened(path, **options):
    return hetero.LLM(path, device="cpu", ctx=256, packed_cache=False, **{"expert_format": "f32", "dense_format": "f32", "max_batch": 2} | options)


@pytest.fixture
def team():
    team = Team(None, 1)
    yield team
    team.close()


class Experts(nn.Module):
    """What transformers' interface sees of a module of experts."""

    has_gate, has_bias, is_transposed, is_concatenated, has_post_expert_norm, _is_expert_parallel = True, False, False, True, False, True

    def __init__(self, count=4, hidden=64, width=32):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.num_experts = count
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * width, hidden, generator=generator) / 8)
        self.down_proj = nn.Parameter(torch.randn(count, hidden, width, generator=generator) / 6)
        self.act_fn = nn.SiLU()

    def _apply_gate(self, both):
        gate, up = both.chunk(2, -1)
        return self.act_fn(gate) * up


def computed(module, team, norm=None):
    E, rows, H = module.gate_up_proj.shape
    store = ExpertStore("f32", E, H, rows // 2, True)
    for e in range(E):
        gate, up = module.gate_up_proj[e].detach().numpy().reshape(2, rows // 2, H)
        store.put(e, gate, up, module.down_proj[e].detach().numpy(), "f32")
    part = spec.MoE(spec.Router(E, 2, "foreign", False), rows // 2)
    return Computed(expert_layer(part, store, None), 0, team, "exact", "generic", norm)


@pytest.mark.parametrize("none", [4, 9, -1])
def test_an_id_that_is_no_expert_means_none(none, team):
    module, x = Experts(), torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    ids, weights = torch.tensor([[0, 1], [2, none], [none, 3], [none, none], [1, 2]]), torch.rand(5, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = batched_mm_experts_forward(module, x, torch.where(ids < 0, 4, ids), torch.where((ids < 0) | (ids > 3), 0, weights))
    got = computed(module, team)(x, ids, weights)
    assert torch.allclose(got, want, atol=1e-5) and not got[3].any()


def test_a_norm_after_each_expert_is_taken_before_the_weights(team):
    module, norm = Experts(), nn.RMSNorm(64)
    module.has_post_expert_norm, module.post_expert_norm = True, norm
    x, ids = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)), torch.tensor([[0, 1], [2, 3], [1, 0]])
    weights = torch.rand(3, 2, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = batched_mm_experts_forward(module, x, ids, weights)
        assert torch.allclose(computed(module, team, norm)(x, ids, weights), want, atol=1e-5)


def test_a_pending_result_is_joined_by_the_first_operation_that_needs_it_and_not_by_a_shape():
    calls = []

    def job():
        calls.append(1)
        return torch.arange(6.0).reshape(2, 3)
    p = Pending.of(job, (2, 3), torch.float32, torch.device("cpu"))
    assert tuple(p.shape) == (2, 3) and p.dtype == torch.float32 and p.size(0) == 2 and not calls
    q = p.view(1, 2, 3)
    assert tuple(q.shape) == (1, 2, 3) and tuple(p.reshape(-1).shape) == (6,) and tuple(p.reshape((3, -1)).shape) == (3, 2) and not calls
    assert torch.equal(q + 1, torch.arange(6.0).reshape(1, 2, 3) + 1) and calls == [1]
    assert torch.equal(torch.cat([p.reshape(-1), torch.zeros(1)]), torch.tensor([0.0, 1, 2, 3, 4, 5, 0])) and type(p * 2) is torch.Tensor


def test_classes_that_this_suite_cannot_make_small_are_these_and_say_why():
    bridged = [n for n in known.bridgeable() if n not in families.FAMILIES and n not in families.TEXT_PARTS]
    assert set(tiny.CANNOT) <= {*bridged, "Qwen3OmniMoeForConditionalGeneration"} and len(bridged) - len(tiny.CANNOT) >= 50
    with pytest.raises(AttributeError, match=tiny.CANNOT["Qwen3OmniMoeForConditionalGeneration"]):
        tiny.build("Qwen3OmniMoeForConditionalGeneration")


def test_an_activation_that_the_kernels_lack_is_refused_by_class_and_key():
    config = json.loads(json.dumps(tiny.config_of("Inkling2ForCausalLM").to_dict())) | {"architectures": ["Inkling2ForCausalLM"]}
    with pytest.raises(UnsupportedModel, match=r"Inkling2Experts has an activation that the kernels do not.*mlp_gate_softcap = 4.0"):
        skeleton.build(config)


def test_a_model_without_routed_experts_and_a_class_that_is_not_there_are_refused():
    dense = json.loads(json.dumps(tiny.config_of("Gemma4ForCausalLM").to_dict())) | {"architectures": ["Gemma4ForCausalLM"], "enable_moe_block": False}
    with pytest.raises(UnsupportedModel, match="has no routed experts"):
        skeleton.build(dense)
    with pytest.raises(UnsupportedModel, match="JetMoEForCausalLM") as e:
        known.require({"architectures": ["JetMoEForCausalLM"], "auto_map": {"AutoModel": "code.py"}})
    assert "supported:" in e.value.hint


def test_requests_together_are_those_alone_and_a_second_turn_goes_on_from_the_first(folder):
    with opened(folder) as llm:
        prompts = [[3, 4, 5, 6] * 6, [7, 8, 9], [10, 11, 12, 13, 14]]
        greedy = hetero.Sampling(max_tokens=6, temperature=0)
        alone = [llm.generate(p, greedy)[0].token_ids for p in prompts]
        llm.engine.clear()
        assert [a.token_ids for a in llm.generate(prompts, greedy)] == alone
        again = llm.generate([[*prompts[0], *alone[0], 20, 21]], greedy)[0]
        assert again.timings.cached_tokens >= 16
        llm.engine.clear()
        assert llm.generate([[*prompts[0], *alone[0], 20, 21]], greedy)[0].token_ids == again.token_ids
        text = "".join(c.text for c in llm.stream([3, 4, 5], greedy))
        assert text == llm.generate([3, 4, 5], greedy)[0].text
        said = llm.report().text()
    assert "bridge" in said and "transformers' own code with our experts" in said and "overlap" in said and "rows.f32" in said


@pytest.mark.parametrize(("format", "bound"), [("bf16", 0.05), ("int8_g32", 0.2)])
def test_matrices_behind_our_kernels_give_the_same_within_their_format(folder, format, bound):
    ids = [(7 * i + 3) % 300 for i in range(30)]
    with opened(folder) as llm:
        want = llm.logits(ids)
    with opened(folder, dense_format=format) as llm:
        got, rows = llm.logits(ids), [r for _, r in llm.report().rows if r.part == "linear"]
    assert rows and {r.format for r in rows} == {format}
    assert float((got - want).abs().amax(-1).median() / want.std()) < bound              # a tie among experts moves a few tokens alone


def test_options_that_a_bridged_model_cannot_have_are_refused(folder):
    for options, word in (({"deterministic": True}, "deterministic"), ({"layers": 2}, "layers"), ({"kv_dtype": "fp8"}, "kv_dtype"),
                          ({"routing": "uniform", "load_format": "dummy"}, "routing"), ({"overlap": False}, "overlap"), ({"kv_ram": 1 << 20}, "kv_ram")):
        with pytest.raises(BadOption, match=word):
            opened(folder, **options)


def changed(folder, path, change):
    shutil.copytree(folder, path)
    found = load_file(path / "model.safetensors")
    change(found)
    save_file(found, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_files_that_lack_a_tensor_or_have_one_too_many_are_refused(folder, tmp_path):
    expert = "model.layers.2.mlp.experts.3.up_proj.weight"
    with pytest.raises(BadCheckpoint, match=r"7 experts for model.layers.2.mlp.experts.gate_up_proj, the config says 8"):
        opened(changed(folder, tmp_path / "a", lambda t: t.pop(expert)))
    with pytest.raises(BadCheckpoint, match=r"no tensor for model.layers.1.self_attn.q_proj.weight"):
        opened(changed(folder, tmp_path / "b", lambda t: t.pop("model.layers.1.self_attn.q_proj.weight")))
    with pytest.raises(UnsupportedModel, match=r"model.layers.1.self_attn.extra.weight"):
        opened(changed(folder, tmp_path / "c", lambda t: t.update({"model.layers.1.self_attn.extra.weight": torch.zeros(2, 2)})))


def test_random_weights_stand_in_for_files(folder, tmp_path):
    shutil.copy(folder / "config.json", tmp_path)
    with opened(tmp_path, load_format="dummy", expert_format="int4_g32") as llm:
        assert len(llm.generate([1, 2, 3], hetero.Sampling(max_tokens=3, temperature=0, ignore_eos=True))[0].token_ids) == 3


def test_plan_of_a_bare_config_counts_what_the_skeleton_holds(folder, tmp_path):
    plan, _ = forecast(str(folder / "config.json"), Options(device="cpu", cache_dir=tmp_path), config_only=True)
    model = tiny.build("AfmoeForCausalLM")[1]
    assert plan.total_params == sum(p.numel() for p in model.parameters())
    assert plan.active_params < plan.total_params and plan.kv_bytes_per_token == 4 * 2 * 2 * 16 * 4
    assert tensors.parameters(skeleton.build(json.loads((folder / "config.json").read_text())).model) == (plan.total_params, plan.active_params)


@pytest.mark.slow
def test_loading_holds_one_expert_beyond_the_arena(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import bridged, json, shutil
bridged.COMMON |= {{"hidden_size": 512, "moe_intermediate_size": 512, "num_experts": 96}}
bridged.save(bridged.build("AfmoeForCausalLM")[1], sys.argv[1])
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / file, tmp_path)
    code = """
import json, sys
import hetero, transformers, torch
from hetero.bridge import place, files, skeleton
import transformers.models.afmoe.modeling_afmoe
def status(key):
    return next(int(l.split()[1]) * 1024 for l in open("/proc/self/status") if l.startswith(key))
open("/proc/self/clear_refs", "w").write("5")
base = status("VmRSS")
with hetero.LLM(sys.argv[1], device="cpu", ctx=64, max_batch=1, packed_cache=False, expert_format="int4_g32", threads=1) as llm:
    print(json.dumps([status("VmHWM") - base, llm.bank.arena.nbytes, sum(s.nbytes for s in llm.weights.stored.values())]))
"""
    out = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    peak, arena, files = json.loads(out.stdout.splitlines()[-1])
    assert files > 800 << 20 and peak < arena + (400 << 20) < files, (peak >> 20, arena >> 20, files >> 20)
