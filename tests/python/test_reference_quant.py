import numpy as np
import pytest

from kdtree_engine.kdtr import BF16Array, to_bf16
from kdtree_engine.reference.quant import dequantize, pack_int4, quantize, unpack_int4


def test_the_bytes_are_those_of_compressed_tensors():
    packed = pack_int4(np.arange(-8, 8)[None])
    assert packed.tobytes() == bytes.fromhex("1032547698badcfe")
    assert packed.dtype == np.int32 and packed.shape == (1, 2)


def test_each_code_has_its_own_nibble():
    one_hot = np.full((8, 8), -8)
    np.fill_diagonal(one_hot, 7)
    words = pack_int4(one_hot).view(np.uint32)[:, 0]
    assert words.tolist() == [0xF << (4 * k) for k in range(8)]


def test_unpacking_undoes_packing():
    codes = np.random.default_rng(0).integers(-8, 8, (5, 64))
    assert np.array_equal(unpack_int4(pack_int4(codes)), codes)


@pytest.mark.parametrize("codes", [[[8] * 8], [[-9] * 8], [[0] * 7]])
def test_codes_that_cannot_be_packed_are_refused(codes):
    with pytest.raises(ValueError, match="codes"):
        pack_int4(np.array(codes))


def test_a_weight_is_code_times_scale_exactly():
    codes = np.tile(np.arange(-8, 8), (2, 4))
    scale = to_bf16([[0.0123, 3.0], [1e-3, 0.5]])
    weight = dequantize(pack_int4(codes), scale)
    assert weight.dtype == np.float32
    exact = codes * np.repeat(scale.to_float32().astype(np.float64), 32, axis=1)
    assert np.array_equal(weight, exact)


def test_quantizing_keeps_a_groups_greatest_and_rounds_the_rest():
    rng = np.random.default_rng(1)
    weight = rng.standard_normal((6, 96)).astype(np.float32)
    weight[0, :32] = 0
    codes, scale = quantize(weight)
    assert isinstance(scale, BF16Array) and scale.shape == (6, 3)
    assert codes.min() == -7 and codes.max() == 7 and not codes[0, :32].any()
    error = np.abs(dequantize(pack_int4(codes), scale) - weight)
    step = np.repeat(scale.to_float32(), 32, axis=1)
    assert (error <= 0.53 * step).all()  # half a step, and the rounding of the scale


def test_agrees_with_the_compressed_tensors_package():
    torch = pytest.importorskip("torch")
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    codes = np.random.default_rng(2).integers(-8, 8, (16, 64)).astype(np.int8)
    theirs = helpers.pack_to_int32(torch.from_numpy(codes), 4).numpy()
    assert np.array_equal(pack_int4(codes), theirs)
    back = helpers.unpack_from_int32(torch.from_numpy(theirs), 4, torch.Size(codes.shape))
    assert np.array_equal(unpack_int4(theirs), back.numpy())
