"""How many rows decode at once follows from rates, memory and what the user says."""
from dataclasses import replace

from hetero import options as settings
from hetero.arch import families
from hetero.batch import size
from hetero.memory.cost import Machine
from hetero.memory.plan import plan
from hetero.weights.source import EMBEDDED, read_config

GiB = 1 << 30
MODEL = families.read(read_config(EMBEDDED))
WIDE = Machine(cores=16, ram_bytes=64 * GiB, dram_bytes_s=80e9, cpu_flops=2e12)


def options(**values):
    return settings.resolve({"device": "cpu", "ctx": 1024, **values}, {}, given_as="argument")


def test_a_flag_is_exact_and_a_config_is_the_most():
    loose = options().with_values("configs/batch.toml", max_batch=256)
    planned = plan(MODEL, WIDE, loose, "int8_g32")
    assert size.pick(MODEL, WIDE, options(max_batch=5), planned, 100.0) == 5
    assert 8 <= size.pick(MODEL, WIDE, loose, planned, 100.0) <= 256


def test_rows_that_fill_the_cache_make_a_smaller_batch():
    loose = options().with_values("configs/batch.toml", max_batch=256)
    tight = replace(WIDE, ram_bytes=plan(MODEL, WIDE, options(max_batch=1), "int8_g32").ram_bytes + (64 << 20))
    assert plan(MODEL, tight, loose, "int8_g32").kv_tokens < 256 * 1000
    assert size.fitting(MODEL, tight, loose, "int8_g32", 1000.0) < size.fitting(MODEL, WIDE, loose, "int8_g32", 1000.0)


def test_the_ceiling_grows_with_rows_until_arithmetic_bounds_it():
    planned = plan(MODEL, WIDE, options(max_batch=256), "int8_g32")
    rates = [size.second_of(planned, MODEL, WIDE, rows) for rows in (1, 8, 64)]
    assert rates == sorted(rates) and rates[2] < 2e12 / (2 * planned.active_params) * 1.5


def test_a_gpu_batch_lets_kv_overflow_into_spare_memory_only():
    card = replace(WIDE, gpu="card", vram_bytes=8 * GiB, vram_bytes_s=4e11, gpu_flops=5e13, pcie_bytes_s=2e10)
    on_gpu = options(device="cuda:0")
    planned = plan(MODEL, card, on_gpu, "int8_g32")
    assert size.overflow(planned, on_gpu) == 8 * GiB and size.overflow(planned, options(device="cuda:0", kv_ram="1G")) == GiB
    assert size.overflow(plan(MODEL, WIDE, options(), "int8_g32"), options()) == 0
