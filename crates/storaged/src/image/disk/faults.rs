//! What a disk does when the file system below it is full, or loses what it was given.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::tests::{of_record, owner, parts};
use super::*;
use crate::error::Left;

const SIZE: u64 = 1 << 20;
const BLOCK: usize = 4096;

/// A small file system of its own, or nothing and a line that is counted.
struct Small(PathBuf);

impl Small {
    fn mount(kib: u32) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: not root");
            return None;
        }
        let place = tempfile::tempdir().unwrap().keep();
        let size = std::ffi::CString::new(format!("size={kib}k")).unwrap();
        let flags = rustix::mount::MountFlags::empty();
        rustix::mount::mount("none", &place, "tmpfs", flags, Some(size.as_c_str())).unwrap();
        Some(Self(place))
    }

    /// A larger one inside of it, which believes that it has room.
    fn promise(&self, mib: u32) -> Option<Self> {
        if !Path::new("/dev/loop-control").exists() {
            println!("SKIPPED: no loop devices");
            return None;
        }
        let (image, place) = (self.0.join("image"), tempfile::tempdir().unwrap().keep());
        File::create(&image).unwrap().set_len(u64::from(mib) << 20).unwrap();
        // Neither a journal nor tables that are written later: nothing but our own writes meets the end.
        let options = ["-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=0,nodiscard"];
        run(Command::new("mkfs.ext4").args(options).arg(&image));
        run(Command::new("mount").args(["-o", "loop,errors=continue"]).arg(&image).arg(&place));
        Some(Self(place))
    }

    fn free_bytes(&self) -> u64 {
        let found = rustix::fs::statvfs(&self.0).unwrap();
        found.f_bavail * found.f_frsize
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
        let _ = fs::remove_dir(&self.0);
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

fn empty(size_bytes: u64) -> Stack {
    Stack { layers: Vec::new(), size_bytes }
}

fn whole(disk: &Disk) -> Vec<u8> {
    let mut whole = vec![0xee; usize::try_from(disk.size_bytes()).unwrap()];
    disk.read(&mut whole, 0).unwrap();
    whole
}

#[test]
fn a_full_disk_costs_what_did_not_fit_and_nothing_else() {
    let Some(small) = Small::mount(600) else { return };
    let parts = parts(&small.0);
    let disk = Disk::create(&parts, owner(), empty(SIZE)).unwrap();
    let mut model = vec![0; usize::try_from(SIZE).unwrap()];
    let mut refused = 0_usize;
    for round in 0..2_u8 {
        for (block, at) in (0..SIZE).step_by(BLOCK).enumerate() {
            match disk.write(&[round + 1; BLOCK], at, false) {
                Ok(()) => model[block * BLOCK..][..BLOCK].fill(round + 1),
                Err(error) => {
                    assert_eq!(error.raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
                    refused += 1;
                }
            }
        }
    }
    assert!(refused > 0 && refused < 2 * model.len() / BLOCK);
    assert!(whole(&disk) == model);
    // Nor does a seal fit, and the disk is as it was.
    fs::write(small.0.join("ballast"), vec![1; BLOCK]).unwrap_or_default();
    let failed = disk.seal().err().unwrap();
    assert_eq!((failed.code, failed.left), (Code::NoSpace, Left::RolledBack));
    assert!(whole(&disk) == model);
    assert!(whole(&of_record(&parts)) == model);
    // What is given back can be used again.
    let _ = fs::remove_file(small.0.join("ballast"));
    disk.discard(0, SIZE / 4).unwrap();
    model[..usize::try_from(SIZE / 4).unwrap()].fill(0);
    disk.seal().unwrap();
    assert!(whole(&disk) == model);
}

#[test]
fn a_hundred_times_its_size_written_to_a_disk_takes_its_size_and_a_discard_gives_it_back() {
    const DISK: u64 = 8 << 20;
    let Some(small) = Small::mount(9 << 10) else { return };
    let parts = parts(&small.0);
    let before = small.free_bytes();
    let disk = Disk::create(&parts, owner(), empty(DISK)).unwrap();
    let data = vec![7; 1 << 16];
    for round in 0..100_u64 {
        for block in 0..DISK / 65536 {
            // All over the disk and off the grid, in another order each time.
            let at = (block * 73 + round * 31) % (DISK / 65536) * 65536;
            let shift = (round % 16) * 4096;
            disk.write(&data, (at + shift).min(DISK - 65536), false).unwrap();
            if block % 16 == 3 {
                disk.discard(at, 20_480).unwrap();
            }
        }
    }
    let used = before - small.free_bytes();
    println!("{} bytes written, {used} in use", 100 * DISK);
    assert!(used <= DISK + (512 << 10));
    disk.discard(0, DISK).unwrap();
    let left = before - small.free_bytes();
    assert!(left <= 512 << 10, "{left} bytes are not given back");
}

#[test]
fn what_the_host_lost_is_reported_to_every_flush_from_then_on() {
    const DISK: u64 = 16 << 20;
    let Some(small) = Small::mount(16 << 10) else { return };
    let Some(lying) = small.promise(64) else { return };
    let parts = parts(&lying.0);
    let disk = Disk::create(&parts, owner(), empty(DISK)).unwrap();
    disk.write(&[1; BLOCK], 0, true).unwrap();
    let ballast = vec![1; usize::try_from(small.free_bytes().saturating_sub(2 << 20)).unwrap()];
    fs::write(small.0.join("ballast"), ballast).unwrap();
    // The file system has promised room that is not there: it takes the writes, and cannot keep them.
    let mut failed = None;
    for at in (0..DISK).step_by(1 << 20) {
        disk.write(&vec![2; 1 << 20], at, false).unwrap();
    }
    for _ in 0..2 {
        failed = disk.flush().err();
        assert!(failed.is_some(), "a flush that kept nothing");
    }
    assert_eq!(failed.and_then(|error| error.raw_os_error()), Some(Errno::IO.raw_os_error()));
    // The host has room again. What was lost is lost all the same.
    fs::remove_file(small.0.join("ballast")).unwrap();
    assert!(disk.flush().is_err());
    assert!(disk.write(&[3; BLOCK], 0, true).is_err());
    assert_eq!(disk.seal().err().unwrap().left, Left::Lost);
    // Attached anew it goes on with what there is.
    disk.close();
    disk.write(&[4; BLOCK], 0, true).unwrap();
    disk.seal().unwrap();
}

#[test]
fn a_layer_that_lost_its_end_is_an_error_for_its_reader_and_never_zeros() {
    let directory = tempfile::tempdir().unwrap();
    let parts = parts(directory.path());
    let disk = Disk::create(&parts, owner(), empty(SIZE)).unwrap();
    disk.write(&vec![7; 1 << 18], 0, false).unwrap();
    let (stack, _held) = disk.seal().unwrap();
    let layer = File::options().write(true).open(parts.library.path(&stack.layers[0])).unwrap();
    layer.set_len(1 << 17).unwrap();
    let mut buf = [0xee; BLOCK];
    disk.read(&mut buf, 0).unwrap();
    assert_eq!(buf, [7; BLOCK]);
    let error = disk.read(&mut buf, (1 << 18) - BLOCK as u64).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(Errno::IO.raw_os_error()));
    // What is written over it can be read.
    disk.write(&[8; BLOCK], (1 << 18) - BLOCK as u64, false).unwrap();
    disk.read(&mut buf, (1 << 18) - BLOCK as u64).unwrap();
    assert_eq!(buf, [8; BLOCK]);
}
