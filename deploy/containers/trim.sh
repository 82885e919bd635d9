# Removes from an environment what no daemon runs: PyTorch's C++ headers, build files and own tests, others' tests.
# Compiles what a daemon imports at its start, which on a read-only root it could not keep; all would be 100 MB.
set -eu
cd "$1"/lib/python*/site-packages
find torch/bin -type f -not -name torch_shm_manager -delete
rm -rf torch/include torch/share torch/test torch/lib/*.a torch/lib/*_test.so numpy/_core/include
find . -type d -name tests -not -path '*/torch/*' -prune -exec rm -rf {} +
"$1"/bin/python -c 'import constriction, google.protobuf.json_format, grpc.aio, grpc_health.v1.health, numpy, prometheus_client
import pydantic, rich.live, rich.logging, safetensors.torch, torch, yaml
pydantic.create_model("Any", value=int)'
