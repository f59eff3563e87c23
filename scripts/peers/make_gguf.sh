#!/bin/sh
# GGUF files in BF16, Q8_0 and Q4_0 of the checkpoints, by llama.cpp's own converter and quantizer.
#   make_gguf.sh [NAME ...]      NAME: a folder under $PEERS_DIR/models; all when none is given
# A file that is there is not made again.
set -eu

PEERS_DIR=${PEERS_DIR:-$HOME/peers}
MODELS=$PEERS_DIR/models
QUANTIZE=$PEERS_DIR/build/llama-build/bin/llama-quantize
CONVERT=$(find "$PEERS_DIR/build" -name convert_hf_to_gguf.py -path '*/vendor/llama.cpp/*' | head -n 1)
[ -n "$CONVERT" ] || { echo "make_gguf: no llama.cpp under $PEERS_DIR/build; run setup.sh first" >&2; exit 1; }

[ $# -gt 0 ] || set -- smollm2-135m-bf16 llama3.2-1b-shape
mkdir -p "$MODELS/gguf"
for name; do
  exact=$MODELS/gguf/$name.bf16.gguf
  if [ ! -f "$exact" ]; then
    "$PEERS_DIR/tf/bin/python" "$CONVERT" "$MODELS/$name" --outtype bf16 --outfile "$exact.part"
    mv "$exact.part" "$exact"
  fi
  for type in Q8_0 Q4_0; do
    small=$MODELS/gguf/$name.$(echo "$type" | tr '[:upper:]' '[:lower:]').gguf
    [ -f "$small" ] && continue
    "$QUANTIZE" "$exact" "$small.part" "$type"
    mv "$small.part" "$small"
  done
done
ls -l "$MODELS/gguf"
