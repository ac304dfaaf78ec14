#!/bin/bash
# /init of a host between which libvirt moves a guest (migrate.sh with BY=libvirt): stock KVM, libvirtd, which listens on the wire, and host.sh.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin:/vmm/bin LC_ALL=C HOME=/root LIBVIRT_DEFAULT_URI=qemu:///system
[ -e /dev/fd ] || ln -s /proc/self/fd /dev/fd
for word in $(cat /proc/cmdline); do case $word in host=*) number=${word#host=} ;; esac done
hostname "host$number"
ip link set lo up
for name in irqbypass kvm ccp kvm-amd; do insmod /modules/$name.ko 2>/dev/null; done
PATIENCE=5
mkdir -p /run/libvirt /var/log/libvirt/qemu
cat >/etc/libvirt/qemu.conf <<CONF
user = "root"
group = "root"
security_driver = "none"
stdio_handler = "file"
namespaces = []
CONF
cat >/etc/libvirt/libvirtd.conf <<CONF
auth_unix_rw = "none"
auth_tcp = "none"
listen_tls = 0
listen_tcp = 1
unix_sock_group = "root"
host_uuid = "00000000-0000-4000-8000-00000000000$number"
log_outputs = "2:file:/tmp/libvirtd.log"
CONF
. /vmm/host.sh
