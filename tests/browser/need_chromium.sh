#!/bin/sh
# Install headless Chromium for the report's tests where apt can, else say what is missing.
set -eu
for name in chromium chromium-browser google-chrome; do
    command -v "$name" >/dev/null 2>&1 && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "Installing Chromium for the report's tests ..."
    apt-get update -qq >/dev/null 2>&1
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null 2>&1
    exit 0
fi
echo "The report's tests need Chromium. Run: apt-get install chromium" >&2
exit 1
