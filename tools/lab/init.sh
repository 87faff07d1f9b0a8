#!/bin/bash
# The first process of the lab host: one job comes in on the second disk, its results go out on the third, then the power goes off.
# Both disks are plain tar archives. What the job prints is on the console, and its status in the results.
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sys /sys
mountpoint -q /dev || mount -t devtmpfs dev /dev
mkdir -p /dev/pts /dev/shm
for place in /tmp /run /dev/shm /mnt; do mount -t tmpfs tmpfs "$place"; done
mount -t devpts pts /dev/pts
mount -t cgroup2 cgroup /sys/fs/cgroup
mount -t debugfs debug /sys/kernel/debug 2>/dev/null
ip link set lo up
mkdir -p /mnt/job /mnt/results
tar -xf /dev/vdb -C /mnt/job
echo "lab: $(uname -r), $(nproc) CPU, up after $(cut -d' ' -f1 /proc/uptime) s"
for module in $(cat /mnt/job/modules); do modprobe "$module" || echo "lab: no module $module"; done
cd /mnt/job
bash ./run </dev/null
echo $? >/mnt/results/status
dmesg >/mnt/results/dmesg
tar -cf /dev/vdc -C /mnt/results . || echo "lab: results are lost"
sync
echo o >/proc/sysrq-trigger
sleep 60
