# Sourced by run.sh: finds CUDA's tools, and lets nvcc find what DeepSpeed's extension needs, also where only
# parts of the toolkit are installed: the rest came with torch, as Python packages. Takes $PYTHON, $SCRATCH.

for folder in "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-*; do
    if [ -x "$folder/bin/nvcc" ]; then
        export CUDA_HOME=$folder PATH=$folder/bin:$PATH
        break
    fi
done
export PATH=$PATH:/usr/local/cuda/bin:${CUDA_HOME:-/usr/local/cuda}/compute-sanitizer

packages=$("$PYTHON" -c '
import glob, os, sysconfig
found = glob.glob(os.path.join(sysconfig.get_path("purelib"), "nvidia", "*", "include", "cuda_runtime.h"))
print(os.path.dirname(os.path.dirname(found[0])) if found else "")
' 2>/dev/null)
if [ -n "$packages" ]; then
    # Searched after all folders that a command names, the toolkit's among them.
    export CPLUS_INCLUDE_PATH=${CPLUS_INCLUDE_PATH:+$CPLUS_INCLUDE_PATH:}$packages/include
    mkdir -p "$SCRATCH/lib"
    for library in "$packages"/lib/libcudart.so.*; do
        [ -e "$library" ] && ln -sf "$library" "$SCRATCH/lib/libcudart.so"
    done
    export LIBRARY_PATH=${LIBRARY_PATH:+$LIBRARY_PATH:}$SCRATCH/lib
fi
unset folder packages library
