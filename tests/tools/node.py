#!/usr/bin/env python3
"""What Kata Containers and KubeVirt ask a node before they run guests there, asked in the same way; written from their sources, of which nothing
is here. Of Kata that is `kata-runtime check` (src/runtime/cmd/kata-runtime/kata-check_amd64.go) and `kata-ctl check`; of KubeVirt the Hyper-V labels of its
node labeller (pkg/virt-handler/node-labeller/kvm-caps-info-plugin_amd64.go) and the devices that virt-handler offers.

    node.py kata       a line for each question; ends with 1 if one that Kata requires is answered with no
    node.py kubevirt   the labels that the node would have; ends with 1 if a device is missing
    node.py models     what QEMU misses here in every one of its CPU models: libvirt tells a model as usable that misses nothing, and KubeVirt
                       gives a node labels of those; ends with 1 if QEMU does not answer
"""
import fcntl
import json
import os
import re
import struct
import subprocess
import sys

KVM_CREATE_VM, KVM_GET_MSR_INDEX_LIST, KVM_CHECK_EXTENSION = 0xAE01, 0xC004AE02, 0xAE03

# Name, capability, MSR: with a capability the MSR is not asked for.
HYPERV = [
    ("base", 44, None), ("time", 96, None), ("vpindex", 149, None), ("tlbflush", 155, None), ("ipi", 161, None), ("synic", 123, None),
    ("synic2", 148, None), ("frequencies", None, 0x40000022), ("reset", None, 0x40000003), ("runtime", None, 0x40000010),
    ("synictimer", None, 0x400000B0), ("reenlightenment", None, 0x40000106),
]


def text(path):
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return None


def module(name):
    """Loaded, or modprobe loads it."""
    return os.path.isdir(f"/sys/module/{name}") or subprocess.run(["modprobe", name], capture_output=True).returncode == 0


def creates_a_vm():
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.close(fcntl.ioctl(kvm, KVM_CREATE_VM, 0))
        return True
    except OSError as error:
        print(f"KVM_CREATE_VM: {error}")
        return False
    finally:
        os.close(kvm)


def kata():
    cpu = text("/proc/cpuinfo").split("\n\n")[0]
    flags = re.search(r"^flags\s*: (.*)$", cpu, re.M).group(1).split()
    intel = "GenuineIntel" in cpu
    own = "kvm_intel" if intel else "kvm_amd"
    asked = [(f"cpu flag {flag}", flag in flags, True) for flag in ("vmx" if intel else "svm", "lm", "sse4_1")]
    asked += [(f"module {name}", module(name), True) for name in ("kvm", own, "vhost", "vhost_net")]
    asked.append(("module vhost_vsock", module("vhost_vsock"), False))
    if intel:
        unrestricted = text("/sys/module/kvm_intel/parameters/unrestricted_guest")
        asked.append(("kvm_intel.unrestricted_guest is Y", unrestricted == "Y", "hypervisor" not in flags))
    asked.append(("/dev/kvm creates a VM", creates_a_vm(), True))
    # kata-ctl alone, with a warning where the parameter is not there.
    periodic = text("/sys/module/kvm/parameters/kvmclock_periodic_sync")
    asked.append(("kata-ctl: kvm.kvmclock_periodic_sync is Y", periodic == "Y", periodic is not None))
    for name, answer, required in asked:
        print(f"kata {'yes' if answer else 'no'}: {name}{'' if required else ' (not required)'}")
    return all(answer for _, answer, required in asked if required)


def msrs(kvm):
    head = bytearray(8)
    try:
        fcntl.ioctl(kvm, KVM_GET_MSR_INDEX_LIST, head)
    except OSError:
        pass  # E2BIG, with the number in it
    (count,) = struct.unpack_from("I", head)
    room = bytearray(4 + 4 * count)
    struct.pack_into("I", room, 0, count)
    fcntl.ioctl(kvm, KVM_GET_MSR_INDEX_LIST, room)
    return set(struct.unpack_from(f"{count}I", room, 4))


def kubevirt():
    kvm = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    indices = msrs(kvm)

    def offered(capability, msr):
        if capability is not None:
            return fcntl.ioctl(kvm, KVM_CHECK_EXTENSION, capability) > 0
        return msr in indices

    labels = [(name, offered(capability, msr)) for name, capability, msr in HYPERV]
    os.close(kvm)
    print("kubevirt hyperv labels:", " ".join(name for name, there in labels if there))
    print("kubevirt hyperv labels that are missing:", " ".join(name for name, there in labels if not there))
    for name in ("kvm_intel", "kvm_amd"):
        nested = text(f"/sys/module/{name}/parameters/nested")
        if nested is not None:
            print(f"kubevirt {name}.nested: {nested}")
    module("vhost_net"), module("tun")
    devices = [(path, os.path.exists(path)) for path in ("/dev/kvm", "/dev/vhost-net", "/dev/net/tun")]
    for path, there in devices:
        print(f"kubevirt device {path}: {'yes' if there else 'no'}")
    return all(there for _, there in devices)


def models():
    asked = "".join('{"execute": "%s"}\n' % name for name in ("qmp_capabilities", "query-cpu-definitions", "quit"))
    line = "qemu-system-x86_64 -machine q35,accel=kvm -cpu host -S -nodefaults -display none -qmp stdio".split()
    said = subprocess.run(line, input=asked, capture_output=True, text=True, timeout=120).stdout
    answers = [json.loads(line).get("return") for line in said.splitlines()]
    missing = {}
    for answer in answers:
        for model in answer if isinstance(answer, list) else []:
            if model["name"] not in ("host", "max", "base"):
                missing[model["name"]] = set(model.get("unavailable-features", []))
    if not missing:
        print(said)
        return False
    print(f"models: {len(missing)}, that miss nothing: {sum(not lacks for lacks in missing.values())}")
    print("missing in every model:", " ".join(sorted(set.intersection(*missing.values()))))
    print("kvm64 misses:", " ".join(sorted(missing.get("kvm64", []))))
    return True


if __name__ == "__main__":
    sys.exit(0 if {"kata": kata, "kubevirt": kubevirt, "models": models}[sys.argv[1]]() else 1)
