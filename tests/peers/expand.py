"""Writes a GGUF file with every matrix in F16, for engines that are measured on unquantized weights.

usage: expand.py FROM TO
"""

import os
import sys

import numpy
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

FILE_TYPE_F16 = 1


def main():
    source, target = sys.argv[1:]
    reader = GGUFReader(source)
    architecture = reader.get_field("general.architecture").contents()
    unfinished = f"{target}.{os.getpid()}"
    writer = GGUFWriter(unfinished, architecture)
    for field in reader.fields.values():
        if field.name in ("general.architecture", "general.file_type") or field.name.startswith("GGUF."):
            continue
        items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], items)
    writer.add_file_type(FILE_TYPE_F16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        matrix = len(tensor.shape) > 1 and tensor.tensor_type != GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, values.astype(numpy.float16 if matrix else numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.rename(unfinished, target)


if __name__ == "__main__":
    main()
