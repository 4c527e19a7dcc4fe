from hypothesis import given
from hypothesis import strategies as st

from hetero.request import philox, uniform


def test_philox_gives_the_published_vectors():
    # known-answer tests of Random123 1.14, philox4x32 with 10 rounds
    assert philox((0, 0), (0, 0, 0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert philox((ones, ones), (ones, ones, ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    assert philox((0xA4093822, 0x299F31D0), (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40))
def test_a_draw_lies_in_the_unit_interval_and_depends_on_seed_and_index_alone(seed, index):
    u = uniform(seed, index)
    assert 0.0 <= u < 1.0
    assert u == uniform(seed, index)
    assert u != uniform(seed, index + 1)
    assert u != uniform(seed ^ 1, index)
