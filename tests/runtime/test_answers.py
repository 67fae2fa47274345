"""What travels from rank 0 arrives equal, number by number, in fewer bytes."""

import math
import pickle
import struct
from array import array
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from espalier.runtime.answers import packed, unpacked


@dataclass(frozen=True)
class Row:
    name: str
    ids: list[int]
    logprobs: Any


def again(answer: Any) -> Any:
    return unpacked(packed(answer))


@pytest.mark.parametrize(
    "numbers",
    [
        [],
        [1, 2, 3],
        list(range(100)),
        [-(2**31), 2**31 - 1] * 10,
        [2**31] * 20,
        [2**70] * 20,
        [2**21 + number for number in range(20)],
        [0.1] * 20,
        [0.5, -0.25] * 10,
        [1e300, 5e-324] * 10,
        [0.5, "x"] * 10,
        [1, None] * 10,
        [True, False] * 10,
        [[1] * 20, [2.0] * 20] * 20,
        ["step"] * 40,
    ],
)
def test_a_list_arrives_as_it_was(numbers: list[Any]) -> None:
    found = again({"numbers": numbers, "text": "x"})["numbers"]
    assert found == numbers
    assert list(map(type, found)) == list(map(type, numbers))


def test_of_a_tensor_nothing_but_its_own_numbers_travels() -> None:
    content = packed(torch.zeros(10**6)[:2])
    assert len(content) < 1000
    found = unpacked(content)
    found += 1  # its own memory
    assert found.tolist() == [1.0, 1.0]
    for tensor in (torch.arange(6).view(2, 3).t(), torch.tensor([True, False]), torch.zeros(0, 3),
                   torch.tensor([1.5], dtype=torch.bfloat16), torch.ones(2, requires_grad=True)):  # fmt: skip
        arrived = again(tensor)
        assert torch.equal(arrived, tensor)
        assert (arrived.dtype, arrived.requires_grad) == (tensor.dtype, tensor.requires_grad)


def test_what_both_ends_have_is_named_and_a_network_that_they_do_not_is_refused() -> None:
    here, there = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    own = [1, 2]
    found = unpacked(packed({"network": here, "both": [own, own]}, [None, own, here]), [None, [3], there])
    assert found == {"network": there, "both": [[3], [3]]}
    with pytest.raises(TypeError, match=r"a network \(Linear\) would come to other ranks as a copy"):
        packed({"network": torch.nn.Linear(1, 1)}, [here])


def test_every_bit_of_a_float_arrives() -> None:
    numbers = [0.0, -0.0, math.inf, -math.inf, math.nan, 0.1, 1 / 3] * 3
    assert struct.pack("21d", *again(numbers)) == struct.pack("21d", *numbers)
    assert again(array("d", numbers)).tobytes() == array("d", numbers).tobytes()
    assert again(array("d", [0.5] * 20)) == array("d", [0.5] * 20)
    assert again(array("i", [5] * 20)) == array("i", [5] * 20)


def test_one_list_at_two_places_is_one_list_and_travels_once() -> None:
    ids = list(range(1000, 2000))
    first, second = again([Row("a", ids, None), Row("b", ids, None)])
    assert first.ids is second.ids
    assert len(packed([ids, ids])) < len(packed(ids)) + 100
    equal = again([[7] * 20, [7] * 20])
    assert equal[0] == equal[1]
    assert equal[0] is not equal[1]


def test_lists_that_are_made_while_it_is_written_do_not_take_one_anothers_place() -> None:
    class Maker:
        def __reduce__(self) -> Any:
            return (list, (list(range(20)),))

    assert again([Maker() for _ in range(50)]) == [list(range(20))] * 50


def test_other_objects_are_pickled_as_ever() -> None:
    tensor, rows = torch.arange(6.0).view(2, 3), np.arange(4)
    found = again((tensor, rows, "text", None, {1: (2, 3)}))
    assert torch.equal(found[0], tensor)
    assert np.array_equal(found[1], rows)
    assert found[2:] == ("text", None, {1: (2, 3)})


def test_token_ids_take_four_bytes_and_so_do_log_probs_in_single_precision() -> None:
    ids = [100_000 + number % 50_000 for number in range(20_000)]
    single = [float(np.float32(-number / 7)) for number in range(20_000)]
    double = [-number / 7 for number in range(20_000)]
    assert len(packed(ids)) / len(ids) == pytest.approx(4, abs=0.05)
    assert len(packed(single)) / len(ids) == pytest.approx(4, abs=0.05)
    assert len(packed(double)) / len(ids) == pytest.approx(8, abs=0.05)
    assert len(pickle.dumps(double)) / len(ids) == pytest.approx(9, abs=0.05)


def test_equal_ids_are_one_object() -> None:
    first, second = again([[5000 + number for number in range(20)] for _ in range(2)])
    assert all(one is other for one, other in zip(first, second, strict=True))
