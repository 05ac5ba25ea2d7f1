#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Makes .venv and installs the project into it. Called by the Makefile; safe to run again.
#   tools/setup.sh                 the project and its development tools
#   tools/setup.sh kernel-tests    what tests of GPU kernels need on a machine without a GPU
#
# torch is several GB when it comes with CUDA, so it is chosen with care:
#   1. the Python in use has torch already (a GPU image, a conda environment): it is kept and never replaced;
#   2. no NVIDIA GPU: the CPU build, from a local wheel folder if pip knows one, else from PyTorch's own index;
#   3. an NVIDIA GPU, or macOS: what `pip install torch` gives.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly TORCH_VERSION=2.13.0    # installed where the machine brings no torch
readonly TORCH_MINIMUM=2.11      # as in pyproject.toml
readonly TRITON_VERSION=3.9.0    # for kernel tests in Triton's interpreter; CPU builds of torch do not bring it
readonly TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
readonly VENV=${VENV:-.venv}

say() { printf '\033[1m==> %s\033[0m\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "no Python 3.11 or newer found (tried: ${PYTHON:-python3 python python3.13 python3.12 python3.11}); install one, or name it: make PYTHON=/path/to/python3.11 setup"
}

torch_version_of() { "$1" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null || true; }

make_venv() {
  local python=$1 torch_version=$2
  [[ -x $VENV/bin/python ]] && return
  say "creating $VENV with $("$python" --version)${torch_version:+ (keeps its torch $torch_version)}"
  "$python" -m venv ${torch_version:+--system-site-packages} "$VENV" || {
    rm -rf "$VENV"
    die "'$python -m venv' failed; on Debian and Ubuntu install the package python3-venv"
  }
  if [[ -n $torch_version ]]; then
    # An active virtual environment is not the "system" of a new one: show the new one where its packages are.
    "$python" -c 'import sys, sysconfig
if sys.prefix != sys.base_prefix: print(sysconfig.get_path("purelib"))' > "$VENV/outer-site-packages"
    if [[ -s $VENV/outer-site-packages ]]; then
      cp "$VENV/outer-site-packages" "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
    fi
  fi
}

install_torch() {
  if [[ $(uname -s) == Darwin || -e /dev/nvidia0 || -e /dev/nvidiactl || -d /proc/driver/nvidia/gpus ]]; then
    say "installing torch $TORCH_VERSION"
    "$VENV/bin/pip" install --quiet "torch==$TORCH_VERSION"
    return
  fi
  say "installing torch $TORCH_VERSION, CPU build"
  "$VENV/bin/pip" install --quiet "torch==$TORCH_VERSION+cpu" 2>/dev/null ||
    "$VENV/bin/pip" install --quiet "torch==$TORCH_VERSION" --index-url "$TORCH_CPU_INDEX" ||
    die "no CPU build of torch $TORCH_VERSION could be installed; install torch yourself ('$VENV/bin/pip install torch') and run make again"
}

base() {
  local python outer_torch torch_version
  python=$(find_python)
  outer_torch=$(torch_version_of "$python")
  make_venv "$python" "$outer_torch"

  torch_version=$(torch_version_of "$VENV/bin/python")
  if [[ -z $torch_version ]]; then
    install_torch
    torch_version=$(torch_version_of "$VENV/bin/python")
  fi
  printf '%s\n' "$TORCH_MINIMUM" "${torch_version%%+*}" | sort -V -C ||
    die "torch $torch_version is installed, $TORCH_MINIMUM or newer is needed; upgrade it, or remove $VENV and use a Python without torch"

  say "installing lazyattention and its development tools (torch stays $torch_version)"
  echo "torch==$torch_version" > "$VENV/constraints.txt"
  "$VENV/bin/pip" install --quiet --constraint "$VENV/constraints.txt" --editable '.[dev]'
}

kernel_tests() {
  if [[ $(uname -s)-$(uname -m) == Linux-x86_64 ]] && ! "$VENV/bin/python" -c 'import triton' 2>/dev/null; then
    say "installing triton $TRITON_VERSION (kernel tests run in its interpreter)"
    "$VENV/bin/pip" install --quiet "triton==$TRITON_VERSION"
  fi
}

case ${1:-base} in
  base) base ;;
  kernel-tests) kernel_tests ;;
  *) die "unknown part '$1'; parts are base and kernel-tests" ;;
esac
