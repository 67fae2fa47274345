"""Digests of weights: one for bytes on a CPU, one that a GPU computes, here on a CPU too."""

import torch

from espalier.sampling.weight_digest import DeviceDigest, digest, flat_bytes


def by_hand(data: bytes) -> str:
    """Compute the device's digest by whole numbers."""
    size, found = 2**64, []
    factors = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)

    def signed(value: int) -> int:
        value %= size
        return value - size if value >= size // 2 else value

    padded = data + bytes(-len(data) % 4)
    words = [int.from_bytes(padded[i : i + 4], "little", signed=True) for i in range(0, len(padded), 4)]
    for k, factor in enumerate(factors):
        total = 0
        for i, word in enumerate(words, start=1):
            mixed = signed(i * factor)
            mixed = signed((mixed ^ (mixed >> 29)) * factors[k - 1])
            total += word * ((mixed ^ (mixed >> 32)) | 1)
        found.append(total % size)
    return f"{(found[0] + len(data)) % size:016x}{found[1]:016x}"


def of(data: bytes, *ends: int) -> str:
    """Give it in parts."""
    found = DeviceDigest("cpu")
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    for start, end in zip((0, *ends), (*ends, len(data)), strict=True):
        found.update(tensor[start:end])
    return found.hexdigest()


def test_a_devices_digest_is_that_of_whole_numbers_in_whatever_parts_it_comes() -> None:
    data = bytes(torch.randint(0, 256, (1003,), generator=torch.Generator().manual_seed(0)).tolist())
    assert of(data) == by_hand(data) == of(data, 16, 640) == of(data, 1000)
    assert of(b"") == by_hand(b"")
    DeviceDigest._WORDS, words = 7, DeviceDigest._WORDS
    try:
        assert of(data, 128) == by_hand(data)
    finally:
        DeviceDigest._WORDS = words


def test_it_tells_every_bit_places_and_lengths_apart() -> None:
    data = bytes(range(64))
    found = {of(data)}
    for place in range(64):
        for bit in range(8):
            found.add(of(data[:place] + bytes([data[place] ^ (1 << bit)]) + data[place + 1 :]))
    assert len(found) == 513
    assert of(data[4:8] + data[:4] + data[8:]) not in found
    assert len({of(bytes(k)) for k in range(20)}) == 20  # zeros


def test_a_weight_has_one_digest_however_it_lies_in_memory() -> None:
    whole = torch.randn(6, 5).bfloat16()
    turned = whole.t().contiguous().t()
    assert digest(turned) == digest(whole)
    assert digest(whole[1:]) != digest(whole[:-1])
    parts = DeviceDigest("cpu")
    parts.update(flat_bytes(whole)[2:])  # begins where no word does
    assert parts.hexdigest() == by_hand(bytes(flat_bytes(whole)[2:].tolist()))
    assert len(digest(torch.tensor(True))) == 32
