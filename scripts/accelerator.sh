#!/bin/sh
# Prints the extra for this machine's GPU: cuda13, cuda12, or nothing where there is none (JAX then runs on the CPU).
# nvidia-smi is run, not looked up: it also exists where the driver does not.
driver=$(timeout 20 nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null </dev/null | head -n 1)
major=${driver%%.*}
case $major in
    '' | *[!0-9]*) exit 0 ;;
esac
if [ "$major" -ge 580 ]; then # CUDA 13 needs driver 580
    echo cuda13
elif [ "$major" -ge 525 ]; then # CUDA 12 needs driver 525
    echo cuda12
else
    echo "note: NVIDIA driver $driver is older than 525, which CUDA 12 needs; using the CPU" >&2
fi
