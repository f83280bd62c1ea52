#!/usr/bin/env bash
# Makes .venv-te: .venv's packages plus TransformerEngine, compiled without a GPU and without optimisation (about 10
# minutes on 2 cores). It is for checking that calls fit TransformerEngine's signatures, not for speed. Needs g++ and a
# CUDA build of torch; CUDA's headers come from $CUDA_HOME, else /usr/local/cuda.
set -euo pipefail
cd "$(dirname "$0")/.."

version=2.20.2
env=.venv-te
cuda=${CUDA_HOME:-/usr/local/cuda}
if [ ! -e "$cuda/include/cuda_runtime.h" ]; then
    echo "no CUDA headers in $cuda; set CUDA_HOME to a CUDA toolkit" >&2
    exit 1
fi
flavour=$(.venv/bin/python -c 'import torch; print("cu" + (torch.version.cuda or "").split(".")[0])')
if [ "$flavour" = cu ]; then
    echo "TransformerEngine needs a CUDA build of torch; .venv has a CPU build" >&2
    exit 1
fi

.venv/bin/python -m venv "$env"
base=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "import site; site.addsitedir('$base')" >"$site/base.pth" # with the packages that it links to
ln -sfn "$base/nvidia" "$site/nvidia" # where TransformerEngine looks for CUDA's libraries
pip=("$env/bin/python" -m pip --disable-pip-version-check)
"${pip[@]}" install --quiet ninja wheel pybind11 'nvidia-cudnn-frontend>=1.29' onnx onnxscript pydantic \
    nvdlfw-inspect pandas
"${pip[@]}" install --quiet --no-deps "transformer-engine==$version" "transformer-engine-$flavour==$version"

source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
"${pip[@]}" download --quiet --no-deps --no-build-isolation --no-binary :all: -d "$source" "transformer-engine-torch==$version"
tar xzf "$source"/*.tar.gz -C "$source"
cd "$source/transformer_engine_torch-$version"
sed -i 's/-O3/-O0/' build_tools/pytorch.py
echo "compiling TransformerEngine $version; about 10 minutes on 2 cores"
includes=$site/include
for folder in cu13 cu12 cuda_runtime cublas cudnn nccl; do
    includes=$includes:$base/nvidia/$folder/include
done
CUDA_HOME=$cuda CPATH=$includes:$cuda/include NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
    MAX_JOBS=${MAX_JOBS:-2} "$OLDPWD/$env/bin/python" -m pip install --quiet --no-deps --no-build-isolation .
cd "$OLDPWD"
"$env/bin/python" -c 'import torch, transformer_engine.pytorch, transformer_engine; print("TransformerEngine", transformer_engine.__version__)'
