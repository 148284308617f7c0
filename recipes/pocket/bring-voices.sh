#!/usr/bin/env bash
# Pack the teachers' programs and WordNet into one archive for a machine that cannot install them:
#   recipes/pocket/bring-voices.sh speech-root.tar.xz
# There: tar -xf speech-root.tar.xz -C DIR, then `--speech-root DIR` in the data stage.
set -euo pipefail
archive="$(realpath -m "${1:?usage: bring-voices.sh OUT.tar.xz}")"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
packages=(flite libflite1 festival libestools2.5 festlex-cmu festlex-poslex festvox-us-slt-hts
    festvox-kallpc16k festvox-kdlpc16k espeak-ng libespeak-ng1 espeak-ng-data libpcaudio0
    libsonic0 wordnet-base)
chmod 755 "$work"
mkdir "$work/debs" "$work/root"
(cd "$work/debs" && apt-get download -qq "${packages[@]}" 2>/dev/null)
for package in "$work"/debs/*.deb; do dpkg -x "$package" "$work/root"; done
# What the programs load besides these packages, save the C and C++ runtimes.
lib="$work/root/usr/lib/x86_64-linux-gnu"
for program in festival flite espeak-ng; do
    LD_LIBRARY_PATH="$lib:$lib/pulseaudio" ldd "$work/root/usr/bin/$program" |
        awk '$3 ~ /^\// && $1 !~ /^(libc|libm|libstdc\+\+|libgcc_s)\.so/ {print $3}' |
        grep -v "^$work" || true
done | sort -u | xargs -r cp -Lt "$lib"
rm -rf "$work"/root/usr/share/{doc,man,lintian}
# Whatever is found outside the archive now would be missing there.
for program in festival flite espeak-ng; do
    if LD_LIBRARY_PATH="$lib" ldd "$work/root/usr/bin/$program" | grep -v "$lib" |
        grep -vE '(linux-vdso|ld-linux-x86-64|libc|libm|libstdc\+\+|libgcc_s)[.-]?so'; then
        echo "bring-voices: $program needs the libraries above from outside the archive" >&2
        exit 1
    fi
done
tar -C "$work/root" -cf - . | xz -T0 -6 >"$archive"
ls -l "$archive"
