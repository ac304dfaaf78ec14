#!/bin/sh
# Makes sure of the private toolchain and hands over to `cargo xtask`, with the first build of it shown.
set -eu
cd "$(dirname "$0")/.."
lab/bootstrap.sh toolchain
if [ ! -x target/lab/cargo/debug/xtask ]; then
    target/lab/bin/cargo build --package xtask
fi
exec target/lab/bin/cargo xtask "$@"
