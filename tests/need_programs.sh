#!/bin/sh
# Install what tests run besides Python, where apt can, else say what is missing: headless Chromium
# for the report, zsh and fish for completion.
set -eu
missing=
for name in zsh fish; do
    command -v "$name" >/dev/null 2>&1 || missing="$missing $name"
done
command -v chromium >/dev/null 2>&1 || command -v chromium-browser >/dev/null 2>&1 \
    || command -v google-chrome >/dev/null 2>&1 || missing="$missing chromium"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing$missing for the tests ..."
    apt-get update -qq >/dev/null 2>&1
    # shellcheck disable=SC2086 # one word each
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null 2>&1
    exit 0
fi
echo "The tests need$missing. Run: apt-get install$missing" >&2
exit 1
