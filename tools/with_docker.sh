#!/usr/bin/env bash
# Runs a command with a Docker engine: `tools/with_docker.sh FOLDER COMMAND...`. If none answers, it runs one of its
# own from Debian's packages, which it unpacks into FOLDER and does not install, and an image made of Debian's packages
# too, because registries of images may be out of reach. The engine has no network and ends with the command.
# AREAL_AGENTS_TEST_IMAGE is the image for the command.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
if docker version >/dev/null 2>&1; then
    exec "$@"
fi
if ! command -v apt-get >/dev/null || [ "$(id -u)" != 0 ]; then
    echo "no Docker engine answers, and only root on Debian or Ubuntu can run one from packages; start yours" >&2
    exit 1
fi
export AREAL_AGENTS_TEST_IMAGE=areal-agents-test
unpacked=$folder/unpacked
if [ ! -e "$unpacked/complete" ]; then
    rm -rf "$folder"
    mkdir -p "$folder/packages/partial" "$unpacked"
    apt-get update -qq
    # The packages with the libraries that this machine lacks; `download` gets those that are installed, too.
    apt-get install -qq --download-only --no-install-recommends -o Dir::Cache::archives="$folder/packages" \
        docker.io debootstrap >/dev/null
    (cd "$folder/packages" && apt-get download -qq docker.io containerd runc debootstrap 2>/dev/null)
    for package in "$folder"/packages/*.deb; do dpkg -x "$package" "$unpacked"; done
    rm -rf "$folder/packages"
    touch "$unpacked/complete"
fi
export PATH=$unpacked/usr/sbin:$unpacked/usr/bin:$PATH
export LD_LIBRARY_PATH=$unpacked/usr/lib/$(uname -m)-linux-gnu:$unpacked/lib/$(uname -m)-linux-gnu
runtime=$(mktemp -d /tmp/areal-agents-engine-XXXXXX) # sockets have short paths
export DOCKER_HOST=unix://$runtime/docker.sock
dockerd --host "$DOCKER_HOST" --data-root "$folder/data" --exec-root "$runtime/run" --pidfile "$runtime/pid" \
    --bridge=none --iptables=false --ip6tables=false >"$folder/engine.log" 2>&1 &
engine=$!
stop() {
    kill "$engine" 2>/dev/null || true
    wait "$engine" || true
    rm -rf "$runtime"
}
trap stop EXIT
for _ in $(seq 150); do
    ! docker version >/dev/null 2>&1 || break
    kill -0 "$engine" 2>/dev/null || break
    sleep 0.2
done
docker version >/dev/null 2>&1 || { echo "the engine did not start:" >&2; tail -n 5 "$folder/engine.log" >&2; exit 1; }
if ! docker image inspect "$AREAL_AGENTS_TEST_IMAGE" >/dev/null 2>&1; then
    root=$folder/root
    rm -rf "$root"
    codename=$(. /etc/os-release && echo "$VERSION_CODENAME")
    DEBOOTSTRAP_DIR=$unpacked/usr/share/debootstrap debootstrap --variant=minbase --include=python3 \
        "$codename" "$root" >"$folder/image.log" 2>&1 || { tail -n 5 "$folder/image.log" >&2; exit 1; }
    tar -C "$root" -c . | docker import - "$AREAL_AGENTS_TEST_IMAGE" >/dev/null
    rm -rf "$root"
fi
unset LD_LIBRARY_PATH
"$@"
