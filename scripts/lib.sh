# shellcheck shell=bash disable=SC2034 # its variables are read by the scripts that source it
#
# Shared by scripts/build, scripts/demo and scripts/test: what they say, which packages they need,
# and how a configuration is built. Sourced, never run. Nothing here needs root or a network where
# every package is already there.

CALLER_DIR="$PWD"
THIS_SCRIPT="$(realpath "$0")"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

BUILD_PACKAGES=(g++ cmake ninja-build libfmt-dev libhwy-dev libhwloc-dev libisal-dev libcli11-dev
  nlohmann-json3-dev)
TEST_PACKAGES=("${BUILD_PACKAGES[@]}" libgtest-dev clang libclang-rt-14-dev pkgconf python3
  iproute2 openmpi-bin libopenmpi-dev mpich libmpich-dev
  pybind11-dev python3-dev python3-numpy python3-pytest python3-mpi4py python3-torch python3-pip
  python3-venv python3-setuptools python3-wheel python3-matplotlib python3-nbclient
  python3-ipykernel python3-tqdm python3-scipy python3-sklearn mypy bible-kjv bible-kjv-text)
BUILD_JOBS="$(nproc)"
ASSUME_YES=0 # set by --yes
LAUNCH=()    # put before a build or a test run, for example to change its address space

say() { printf '\n== %s\n' "$*"; }

fail() {
  printf '%s: %s\n' "scripts/$(basename "$THIS_SCRIPT")" "$*" >&2
  exit 1
}

# The comment paragraph at the top of the calling script is its help.
print_help() {
  sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$THIS_SCRIPT"
}

# A compiler or tool that did not come as a Debian package counts, too.
command_of_package() {
  case "$1" in
    g++ | cmake | python3) echo "$1" ;;
    ninja-build) echo ninja ;;
    clang) echo clang++ ;;
    pkgconf) echo pkg-config ;;
  esac
}

package_present() {
  local tool
  tool="$(command_of_package "$1")"
  if [[ -n $tool ]] && command -v "$tool" >/dev/null; then
    return 0
  fi
  dpkg-query -W -f '${db:Status-Status}\n' "$1" 2>/dev/null | grep -qx installed
}

# Asks once, and only a person at a terminal.
confirm_install() {
  if ((ASSUME_YES)) || [[ ! -t 0 || ! -t 1 ]]; then
    return 0
  fi
  local answer
  read -r -p "Install them now? [Y/n] " answer
  [[ -z $answer || $answer == [Yy]* ]] || fail "nothing was installed; run it again when they are"
}

apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -q "$@" </dev/null
}

install_packages() {
  if ! compgen -G '/var/lib/apt/lists/*_Packages*' >/dev/null; then
    apt_get update
  fi
  # Lists of an earlier day name versions that the archive no longer has: renew them, try again.
  apt_get install -y --no-install-recommends "$@" ||
    { apt_get update && apt_get install -y --no-install-recommends "$@"; } ||
    fail "apt-get could not install: $*; see its message above"
}

# ensure_packages PACKAGE...: installs those that are missing, after saying which.
ensure_packages() {
  local package missing=()
  if ! command -v dpkg-query >/dev/null; then
    printf 'Not a Debian system: these must be there under their names here: %s\n' "$*"
    return 0
  fi
  for package in "$@"; do
    package_present "$package" || missing+=("$package")
  done
  if ((${#missing[@]} == 0)); then
    return 0
  fi
  say "Packages to install: ${missing[*]}"
  if ((EUID != 0)); then
    printf 'An administrator must run:\n  apt-get update && apt-get install -y %s\n' \
      "${missing[*]}" >&2
    fail "${#missing[@]} package(s) missing and no root to install them; nothing was changed"
  fi
  confirm_install
  install_packages "${missing[@]}"
}

# configure_preset PRESET: shows the summary of what is on and off; all the output if it fails.
configure_preset() {
  local log="build/$1/configure.log"
  mkdir -p "build/$1"
  if ! cmake --preset "$1" >"$log" 2>&1; then
    cat "$log" >&2
    printf 'Configuring preset %s failed. If build/%s is from another place, remove it.\n' \
      "$1" "$1" >&2
    return 1
  fi
  sed -n '/-- Ferry /,/-- Configuring done/{/Configuring done/d;p}' "$log"
}

# build_preset PRESET [TARGET...]
build_preset() {
  local preset="$1"
  shift
  "${LAUNCH[@]}" cmake --build "build/$preset" --parallel "$BUILD_JOBS" ${1:+--target "$@"}
}
