#!/usr/bin/env python3
"""Holds the rooms to their arrows: reads every #include and fails on one that goes upward or sideways, or that uses another room's library.

check_layers.py [ROOT]         checks the tree, this one unless told
check_layers.py --self-test    plants violations in a tree of its own and expects each to be found
"""
import pathlib
import re
import sys
import tempfile

# What a room may include besides itself.
BELOW = {
    "memory": set(),
    "ops": {"memory"},
    "parallel": {"ops", "memory"},
    "io": {"memory"},
    "core": {"parallel", "io", "ops", "memory"},
    "app": {"core", "parallel", "io", "ops", "memory"},
}
# Which rooms an outside library belongs to.
OWNERS = [
    ("MPI", re.compile(r"mpi(-ext)?\.h$"), {"parallel"}),
    ("NCCL", re.compile(r"nccl(_device)?\.h$"), {"parallel"}),
    ("yaml-cpp", re.compile(r"yaml-cpp/"), {"io"}),
    ("HDF5", re.compile(r"(hdf5(_hl)?|H5\w+)\.h$"), {"io"}),
    ("nlohmann-json", re.compile(r"nlohmann/"), {"io"}),
    ("zlib", re.compile(r"zlib\.h$"), {"io"}),
    ("CLI11", re.compile(r"CLI/"), {"app"}),
    ("BLAS", re.compile(r"(cblas|lapacke?|openblas_config)\.h$"), {"ops"}),
    ("cuBLAS", re.compile(r"cublas"), {"ops"}),
    ("CUB", re.compile(r"cub/"), {"ops"}),
    ("CUTLASS", re.compile(r"(cutlass|cute)/"), {"ops"}),
    # Among it the headers of kernels: libcu++ (whose names have no suffix), cooperative groups, number types, intrinsics.
    ("the CUDA runtime", re.compile(r"(cuda|cooperative_groups|driver_types|vector_types|mma|sm_\d+)\w*\.h$|cuda/(std/)?\w+$|nvtx3/"), {"memory", "ops"}),
]
LOGGER = re.compile(r"(spdlog|fmt)/")  # nvcc cannot read it, so no header may carry it into a kernel
GENERATED = {"version.h"}
SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')


def judge(room, suffix, quoted, angled):
    """Why this include is not allowed, or None."""
    target = quoted or angled
    for library, names, owners in OWNERS:
        if names.match(target) and room not in owners:
            return f"{library} belongs to {', '.join(sorted(owners))}"
    if LOGGER.match(target) and suffix != ".cpp":
        return "spdlog and fmt stay in .cpp files"
    first = target.split("/")[0]
    if first in BELOW and "/" in target:
        if first != room and first not in BELOW[room]:
            return f"{room} may not see {first}"
    elif first == "tests" and "/" in target:
        return "a room may not see the tests"
    elif quoted and target not in GENERATED and not any(names.match(target) for _, names, _ in OWNERS):
        return "written from the root, as room/file.h"
    return None


def faults(root):
    found = []
    read = 0
    for room in BELOW:
        for path in sorted((root / room).rglob("*")):
            if path.suffix not in SUFFIXES or not path.is_file():
                continue
            read += 1
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
                include = INCLUDE.match(line)
                if include:
                    why = judge(room, path.suffix, include.group(1), include.group(2))
                    if why:
                        found.append(f"{path.relative_to(root)}:{number}: {line.strip()}: {why}")
    return read, found


def self_test():
    bad = [
        ("memory/a.h", '#include "ops/context.h"'),
        ("ops/cpu/a.cpp", '#include "parallel/mesh.h"'),
        ("ops/a.cpp", '#include "core/config.h"'),
        ("parallel/a.cpp", '#include "io/yaml.h"'),
        ("io/a.cpp", '#include "parallel/mesh.h"'),
        ("io/b.cpp", '#include "ops/context.h"'),
        ("core/a.cpp", '#include "app/cli.h"'),
        ("core/b.cpp", "#include <mpi.h>"),
        ("core/c.h", "  #  include <nccl.h>"),
        ("core/d.cpp", "#include <hdf5.h>"),
        ("app/a.cpp", "#include <yaml-cpp/yaml.h>"),
        ("core/e.cpp", "#include <CLI/CLI.hpp>"),
        ("core/f.cpp", "#include <cblas.h>"),
        ("parallel/b.cpp", "#include <cuda_runtime.h>"),
        ("parallel/c.cpp", "#include <cuda_bf16.h>"),
        ("io/c.cpp", "#include <cuda/barrier>"),
        ("core/g.cpp", "#include <cublas_v2.h>"),
        ("memory/b.cpp", "#include <cublasLt.h>"),
        ("memory/c.cu", "#include <cub/cub.cuh>"),
        ("ops/c.cpp", "#include <nccl.h>"),
        ("core/i.cpp", "#include <nlohmann/json.hpp>"),
        ("app/b.cpp", "#include <nlohmann/json_fwd.hpp>"),
        ("core/j.cpp", "#include <zlib.h>"),
        ("ops/cuda/b.cu", '#include "cuda/launch.cuh"'),
        ("ops/a.h", "#include <spdlog/spdlog.h>"),
        ("ops/cuda/a.cu", "#include <fmt/format.h>"),
        ("core/h.cpp", '#include "tests/support/compare.h"'),
        ("ops/b.cpp", '#include "context.h"'),
    ]
    good = [
        ("memory/ok.cpp", "#include <cuda_runtime.h>\n#include <spdlog/spdlog.h>\n#include <vector>\n#include \"memory/a.h\""),
        ("ops/cuda/ok.cu", '#include "ops/cuda/launch.cuh"\n#include <cub/cub.cuh>\n#include <cublasLt.h>\n#include <cuda/std/array>\n#include <mma.h>\n#include "memory/a.h"'),
        ("parallel/ok.cpp", '#include <mpi.h>\n#include <nccl.h>\n#include "ops/a.h"'),
        ("io/ok.cpp", '#include <hdf5.h>\n#include <yaml-cpp/yaml.h>\n#include <nlohmann/json.hpp>\n#include <zlib.h>\n#include "memory/a.h"'),
        ("core/ok.cpp", '#include "io/a.h"\n#include "ops/a.h"\n#include "parallel/a.h"\n#include "version.h"'),
        ("app/ok.cpp", '#include <CLI/CLI.hpp>\n#include "core/a.h"\n// #include "not/read.h"'),
    ]
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for name, text in bad + good:
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        read, found = faults(root)
    accused = {line.split(":")[0] for line in found}
    wrong = [f"not found: {name}: {text}" for name, text in bad if name not in accused]
    wrong += [f"wrongly accused: {line}" for line in found if line.split(":")[0] not in {name for name, _ in bad}]
    if read != len(bad) + len(good):
        wrong.append(f"read {read} files of {len(bad) + len(good)}")
    for line in wrong:
        print(line)
    print(f"check_layers: {len(bad) - sum(w.startswith('not found') for w in wrong)} of {len(bad)} planted violations found")
    return 1 if wrong else 0


def main(arguments):
    if arguments == ["--self-test"]:
        return self_test()
    if len(arguments) > 1 or (arguments and arguments[0].startswith("-")):
        print(__doc__.strip(), file=sys.stderr)
        return 2
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parent.parent
    read, found = faults(root)
    for line in found:
        print(line)
    if read == 0:
        print(f"check_layers: no source under {root}", file=sys.stderr)
        return 2
    print(f"check_layers: {read} files, {len(found)} violations")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
