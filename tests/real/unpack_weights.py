"""Writes a model file with 16-bit weights in place of quantised ones. Runs in the model server's environment.

    python unpack_weights.py SOURCE.gguf TARGET.gguf F16|BF16

The server's build multiplies quantised weights with AVX-VNNI instructions, which many processors with AVX-512 do
not have; 16-bit weights are multiplied without them.
"""

import sys

import gguf  # type: ignore[import-not-found,unused-ignore]

OWN = ("general.architecture", "general.file_type")


def unpack(source: str, target: str, name: str) -> None:
    """Copy every key and tensor of ``source``; what is quantised becomes the 16-bit type ``name``."""
    wide = gguf.GGMLQuantizationType[name]
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name not in OWN:
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=element)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{name}"])
    for tensor in reader.tensors:
        if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
            writer.add_tensor(tensor.name, tensor.data)
        else:
            data = gguf.quantize(gguf.dequantize(tensor.data, tensor.tensor_type), wide)
            writer.add_tensor(tensor.name, data, raw_dtype=wide)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    unpack(*sys.argv[1:])
