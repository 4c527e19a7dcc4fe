"""The switch to tile products: measured once per shape, remembered, told; a refusal of tile registers is told too."""
import json

import pytest

from cpu_kernels import ExpertLayer, ExpertStore, cpu, tiles
from cpu_kernels.team import Team
from hetero.memory import switch


@pytest.fixture
def layers(monkeypatch):
    made = [ExpertLayer(ExpertStore("int8_g32", 2, 64, inter)) for inter in (64, 64, 128)]
    asked = []

    def tune(self, team):
        asked.append(self.store.inter)
        return 8 if self.store.inter == 64 else 32
    monkeypatch.setattr(ExpertLayer, "tune", tune)
    for layer in made:
        layer.amx = True
    return made, asked


def test_each_shape_is_measured_once_and_remembered(layers, tmp_path):
    made, asked = layers
    with Team(threads=1) as team:
        assert switch.tune(made, team, tmp_path) == "from 8 to 32 tokens of an expert, measured now"
        assert [layer.switch for layer in made] == [8, 8, 32]
        assert asked == [64, 128]
        for layer in made:
            layer.switch = 16
        assert switch.tune(made, team, tmp_path) == "from 8 to 32 tokens of an expert, measured before"
        assert [layer.switch for layer in made] == [8, 8, 32]
        assert asked == [64, 128]


@pytest.mark.parametrize("text", ["", "[]", '{"a": "b"}', '{"a": 0}'])
def test_a_strange_file_is_measured_over(layers, tmp_path, text):
    made, asked = layers
    with Team(threads=1) as team:
        switch.tune(made[:1], team, tmp_path)
        file, = tmp_path.iterdir()
        file.write_text(text)
        switch.tune(made[:1], team, tmp_path)
        assert asked == [64, 64]
        assert list(json.loads(file.read_text()).values()) == [8]


def test_nothing_is_said_without_tiles():
    with Team(threads=1) as team:
        layer = ExpertLayer(ExpertStore("int8_g32", 2, 64, 64), isa="generic")
        assert switch.tune([layer], team, None) == ""
        assert layer.kernel() == "rows.int8_g32"


def test_the_kernel_is_named_for_few_and_for_many_tokens(layers):
    layer = layers[0][0]
    layer.switch = 8
    assert layer.kernel() == "rows.int8_g32, from 8 tokens tiles.bf16"
    assert layer.kernel("fast") == "rows.int8_g32, from 8 tokens tiles.int8"
    assert layer.kernel("exact") == layer.kernel("fast", deterministic=True) == "rows.int8_g32"


def test_a_refusal_of_tile_registers_is_told(monkeypatch):
    monkeypatch.setattr(cpu, "isa", lambda named=None: "amx")
    monkeypatch.setattr(tiles, "permitted", lambda: False)
    layer = ExpertLayer(ExpertStore("int8_g32", 2, 64, 64))
    assert not layer.amx
    assert "AMX" in layer.refused
    assert layer.kernel() == "rows.int8_g32"
