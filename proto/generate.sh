#!/bin/sh
# Write the generated protobuf modules into common/afl/v1, or into the folder given as $1.
set -eu
cd "$(dirname "$0")/.."
out="${1:-common}"
mkdir -p "$out/afl/v1"
"${PYTHON:-python}" -m grpc_tools.protoc -I proto --python_out="$out" --pyi_out="$out" afl/v1/federation.proto
