"""Runs in the oracle environment: MXFP4 by compressed-tensors, as its observer and compressor do it.

    compressed_mxfp4.py IN.safetensors OUT.safetensors

IN: `w` fp32 [N, 32] to encode; `packed` u8 [M, 16] and `scale` u8 [M, 1] to decode. OUT: the encoding of w, and both
decodings.
"""

import sys

import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file

ARGS = QuantizationArgs(num_bits=4, type="float", strategy="group", group_size=32, symmetric=True, dynamic=False,
                        scale_dtype=torch.uint8)
SCHEME = QuantizationScheme(targets=["Linear"], weights=ARGS)


def decode(packed, scale):
    return MXFP4PackedCompressor.decompress({"weight_packed": packed, "weight_scale": scale}, SCHEME)["weight"]


if __name__ == "__main__":
    given = load_file(sys.argv[1])
    w = given["w"]
    scale, _ = calculate_qparams(w.amin(-1, keepdim=True), w.amax(-1, keepdim=True), ARGS)
    made = MXFP4PackedCompressor.compress({"weight": w, "weight_scale": scale}, SCHEME)
    save_file({
        "packed": made["weight_packed"].contiguous(), "scale": made["weight_scale"].contiguous(),
        "values": decode(made["weight_packed"], made["weight_scale"]).float().contiguous(),
        "given_values": decode(given["packed"], given["scale"]).float().contiguous(),
    }, sys.argv[2])
