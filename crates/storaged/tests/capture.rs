//! Changed memory of a process as a layer, and what is left when that fails.

#![allow(clippy::unwrap_used, reason = "a test ends at what it did not expect, helpers included")]

#[allow(dead_code, reason = "the tests of freezing need more of it")]
mod victim;

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use layers::Identity;
use storaged::error::{Code, Left};
use storaged::memory::capture::{Extent, LayerSink, capture};
use storaged::memory::layer::capture_layer;
use storaged::memory::process::Process;
use victim::{DIRTY_MIB, SIZE_MIB, Victim, scratch};

static NEVER: AtomicBool = AtomicBool::new(false);

#[test]
fn a_layer_holds_what_changed_and_nothing_else() {
    let Some(victim) = Victim::start("still", &["hole"]) else { return };
    let path = scratch().join(format!("layer-{}", std::process::id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let process = Process::open(victim.pid()).unwrap();

    let captured = capture_layer(&process, &victim.image, &file, Identity::new(SIZE_MIB << 20), &NEVER).unwrap();

    // Each eighth page is zero, and so is the hole; page 0 is one of the former.
    let dirty_pages = (DIRTY_MIB << 20) / 4096;
    let zero_pages = 16 + (dirty_pages - 16) / 8;
    assert_eq!(captured.zero_bytes, zero_pages * 4096);
    assert_eq!(captured.data_bytes, (dirty_pages - zero_pages) * 4096);
    assert!(file.metadata().unwrap().len() < captured.data_bytes + (1 << 20));
    let layer = layers::Layer::open(&file).unwrap();
    let mut now = vec![0; usize::try_from(DIRTY_MIB << 20).unwrap()];
    process.read(&[(victim.address, victim.address + (DIRTY_MIB << 20))], &mut now).unwrap();
    let stack = layers::Stack::new(vec![layer]).unwrap();
    let mut was = vec![7; now.len() + 4096];
    layers::ReadAt::read_exact_at(&stack, &mut was, 0).unwrap();
    assert!(was[..now.len()] == now[..]);
    assert!(was[now.len()..].iter().all(|&byte| byte == 0));
    std::fs::remove_file(&path).unwrap();
    victim.finish();
}

/// Fails at its nth call, or does something then.
struct Odd<F: FnMut() -> io::Result<()> + Send>(F);

impl<F: FnMut() -> io::Result<()> + Send> LayerSink for Odd<F> {
    fn reserve(&mut self, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn append(&mut self, _: &[Extent], _: &[u8]) -> io::Result<()> {
        (self.0)()
    }
}

#[test]
fn a_full_disk_a_dead_process_and_a_cancelled_capture_are_told_apart() {
    let Some(mut victim) = Victim::start("still", &[]) else { return };
    let process = Process::open(victim.pid()).unwrap();

    let full = capture(&process, &victim.image, &mut Odd(|| Err(rustix::io::Errno::NOSPC.into())), &NEVER).unwrap_err();
    assert_eq!((full.code, full.left), (Code::NoSpace, Left::RolledBack));

    let cancel = AtomicBool::new(false);
    let mut cancelling = Odd(|| {
        cancel.store(true, Ordering::Relaxed);
        Ok(())
    });
    let cancelled = capture(&process, &victim.image, &mut cancelling, &cancel).unwrap_err();
    assert_eq!(cancelled.code, Code::Unavailable);

    let image = victim.image.clone();
    let mut killing = Odd(|| {
        victim.kill();
        Ok(())
    });
    let died = capture(&process, &image, &mut killing, &NEVER).unwrap_err();
    assert_eq!(died.code, Code::Unavailable);
}

#[test]
fn the_table_of_pages_and_the_scan_agree() {
    let Some(victim) = Victim::start("still", &["hole"]) else { return };
    let process = Process::open(victim.pid()).unwrap();
    for area in process.areas(&victim.image).unwrap() {
        let ranges = |from| -> Vec<_> { Iterator::map(from, Result::unwrap).collect() };
        let scanned: Vec<(u64, u64)> = ranges(process.private(area.start, area.end));
        let read: Vec<(u64, u64)> = ranges(process.private(area.start, area.end).from_table());
        assert_eq!(scanned, read);
    }
    victim.finish();
}
