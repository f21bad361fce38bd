import math

import numpy as np
import numpy.typing as npt
import pytest

from twopool.kernels.philox import gumbel_noise, philox4x32

Floats = npt.NDArray[np.float64]

# kat_vectors of the Random123 reference implementation, philox4x32 with 10 rounds.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((2**32 - 1,) * 4, (2**32 - 1,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None, None], np.array(key, dtype=np.uint64)[:, None])
    assert tuple(words[:, 0, 0].tolist()) == expected


def gumbel(seeds: list[int], positions: list[int], choices: list[int], num_values: int) -> Floats:
    return gumbel_noise(np.array(seeds), np.array(positions), np.array(choices), num_values)


def noise(seed: int = 0, position: int = 0, choice: int = 0, num_values: int = 64) -> Floats:
    row: Floats = gumbel([seed], [position], [choice], num_values)[0]
    return row


def test_every_part_of_the_key_matters_and_nothing_else() -> None:
    base = noise()
    assert np.array_equal(base, noise())
    assert np.array_equal(base[:13], noise(num_values=13))
    for other in (noise(seed=1), noise(seed=2**32), noise(seed=-(2**63)), noise(position=1), noise(choice=1)):
        assert not np.array_equal(base, other)
    assert not np.array_equal(noise(position=1), noise(choice=1))


def test_rows_do_not_depend_on_their_neighbours() -> None:
    seeds, positions, choices = [5, -3, 2**62], [0, 7, 100_000], [0, 127, 3]
    together = gumbel(seeds, positions, choices, 50)
    for row in range(3):
        assert np.array_equal(together[row], noise(seeds[row], positions[row], choices[row], 50))


def test_noise_is_standard_gumbel() -> None:
    values = gumbel(list(range(200)), [0] * 200, [0] * 200, 1000)
    assert bool(np.isfinite(values).all())
    assert math.isclose(values.mean(), 0.57722, abs_tol=0.01)
    assert math.isclose(values.var(), math.pi**2 / 6, abs_tol=0.03)
