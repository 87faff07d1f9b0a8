//! Tests of "a path that shows a device": the same for every front end. And devices to show.

use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Condvar, Mutex, RwLock};

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use storaged::device::{Answer, Device, DeviceId, Kind};
use storaged::directory::{Directory, Named};

pub(crate) const BLOCK: usize = 4096;
/// On x86-64.
const O_DIRECT: i32 = 0o40_000;
const O_DSYNC: i32 = 0o10_000;

pub(crate) fn id(number: u64) -> DeviceId {
    DeviceId(NonZeroU64::new(number).unwrap())
}

/// Bytes in memory, with faults to order.
pub(crate) struct Bytes {
    kind: Kind,
    pub(crate) content: RwLock<Vec<u8>>,
    pub(crate) flushes: AtomicU64,
    pub(crate) durable_writes: AtomicU64,
    pub(crate) discards: AtomicU64,
    /// What every read and write fails with; 0 is nothing.
    pub(crate) error: AtomicU64,
    /// Reads never take place at once.
    pub(crate) always_waits: AtomicBool,
    pub(crate) hang: Gate,
}

/// Closed, it holds up whoever comes.
#[derive(Default)]
pub(crate) struct Gate {
    closed: Mutex<(bool, usize)>,
    changed: Condvar,
}

impl Gate {
    pub(crate) fn close(&self) {
        self.closed.lock().unwrap().0 = true;
    }

    pub(crate) fn open(&self) {
        self.closed.lock().unwrap().0 = false;
        self.changed.notify_all();
    }

    pub(crate) fn wait_held_up(&self, count: usize) {
        drop(self.changed.wait_while(self.closed.lock().unwrap(), |state| state.1 < count).unwrap());
    }

    fn pass(&self) {
        let mut state = self.closed.lock().unwrap();
        state.1 += 1;
        self.changed.notify_all();
        let mut state = self.changed.wait_while(state, |state| state.0).unwrap();
        state.1 -= 1;
    }
}

impl Bytes {
    pub(crate) fn new(kind: Kind, bytes: Vec<u8>) -> Arc<Self> {
        Arc::new(Self {
            kind,
            content: RwLock::new(bytes),
            flushes: AtomicU64::new(0),
            durable_writes: AtomicU64::new(0),
            discards: AtomicU64::new(0),
            error: AtomicU64::new(0),
            always_waits: AtomicBool::new(false),
            hang: Gate::default(),
        })
    }

    fn fault(&self) -> io::Result<()> {
        match i32::try_from(self.error.load(SeqCst)).unwrap() {
            0 => Ok(()),
            error => Err(io::Error::from_raw_os_error(error)),
        }
    }

    fn range(&self, offset: u64, length: usize) -> io::Result<std::ops::Range<usize>> {
        let start = usize::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        let end = start.checked_add(length).filter(|end| *end <= self.content.read().unwrap().len());
        Ok(start..end.ok_or(io::ErrorKind::InvalidInput)?)
    }
}

impl Device for Bytes {
    fn kind(&self) -> Kind {
        self.kind
    }

    fn size_bytes(&self) -> u64 {
        self.content.read().unwrap().len() as u64
    }

    fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.hang.pass();
        self.fault()?;
        let range = self.range(offset, buf.len())?;
        buf.copy_from_slice(&self.content.read().unwrap()[range]);
        Ok(())
    }

    fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        if self.always_waits.load(SeqCst) {
            return Ok(Answer::WouldWait);
        }
        self.read(buf, offset).map(|()| Answer::Done)
    }

    fn write(&self, buf: &[u8], offset: u64, durable: bool) -> io::Result<()> {
        self.fault()?;
        self.durable_writes.fetch_add(u64::from(durable), SeqCst);
        let range = self.range(offset, buf.len())?;
        self.content.write().unwrap()[range].copy_from_slice(buf);
        Ok(())
    }

    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        self.fault()?;
        self.discards.fetch_add(1, SeqCst);
        let range = self.range(offset, usize::try_from(length).unwrap())?;
        self.content.write().unwrap()[range].fill(0);
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        self.flushes.fetch_add(1, SeqCst);
        self.fault()
    }
}

/// Devices by number; names are not asked for.
#[derive(Default)]
pub(crate) struct Table(pub(crate) RwLock<std::collections::BTreeMap<DeviceId, Arc<dyn Device>>>);

impl Table {
    pub(crate) fn put(&self, number: u64, device: Arc<dyn Device>) -> DeviceId {
        self.0.write().unwrap().insert(id(number), device);
        id(number)
    }
}

impl Directory for Table {
    fn device(&self, id: DeviceId) -> Option<Arc<dyn Device>> {
        self.0.read().unwrap().get(&id).cloned()
    }

    fn find(&self, kind: Kind, name: &str) -> Option<DeviceId> {
        let found = id(name.parse().ok()?);
        (self.device(found)?.kind() == kind).then_some(found)
    }

    fn list(&self, kind: Kind, after: Option<DeviceId>, limit: usize) -> Vec<Named> {
        let table = self.0.read().unwrap();
        let some = table.iter().filter(|(id, device)| Some(**id) > after && device.kind() == kind).take(limit);
        some.map(|(id, _)| Named { id: *id, name: id.0.to_string() }).collect()
    }
}

/// Memory that direct I/O can use.
pub(crate) struct Aligned(Vec<u8>, usize);

impl Aligned {
    pub(crate) fn new(length: usize, fill: u8) -> Self {
        let bytes = vec![fill; length + BLOCK];
        let first = bytes.as_ptr().align_offset(BLOCK);
        Self(bytes, first)
    }

    pub(crate) fn all(&mut self, length: usize) -> &mut [u8] {
        &mut self.0[self.1..self.1 + length]
    }
}

pub(crate) fn direct(path: &Path) -> File {
    File::options().read(true).write(true).custom_flags(O_DIRECT).open(path).unwrap()
}

/// Numbers that look random and are the same each time.
pub(crate) struct Dice(pub u64);

impl Dice {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

pub(crate) fn is_same_as_bytes_under_random_work(path: &Path, device: &Bytes, rounds: u32) {
    let file = direct(path);
    let mut model = device.content.read().unwrap().clone();
    let blocks = (model.len() / BLOCK) as u64;
    let mut dice = Dice(1);
    for round in 0..rounds {
        let first = dice.below(blocks);
        let count = 1 + dice.below((blocks - first).min(300));
        let (offset, length) = (first * BLOCK as u64, usize::try_from(count).unwrap() * BLOCK);
        let place = usize::try_from(offset).unwrap();
        match dice.below(4) {
            0 => {
                let value = u8::try_from(dice.below(256)).unwrap();
                let mut bytes = Aligned::new(length, value);
                file.write_all_at(bytes.all(length), offset).unwrap();
                model[place..place + length].fill(value);
            }
            1 => {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                fallocate(file.as_fd(), flags, offset, length as u64).unwrap();
                model[place..place + length].fill(0);
            }
            _ => {
                let mut bytes = Aligned::new(length, 1);
                file.read_exact_at(bytes.all(length), offset).unwrap();
                assert!(bytes.all(length) == &model[place..place + length], "round {round}");
            }
        }
    }
    assert!(*device.content.read().unwrap() == model);
}

pub(crate) fn flush_and_durable_writes_arrive(path: &Path, device: &Bytes) {
    let file = direct(path);
    let mut bytes = Aligned::new(BLOCK, 3);
    file.write_all_at(bytes.all(BLOCK), 0).unwrap();
    let before = device.flushes.load(SeqCst);
    file.sync_all().unwrap();
    assert!(device.flushes.load(SeqCst) > before);

    let before = device.durable_writes.load(SeqCst) + device.flushes.load(SeqCst);
    let durable = File::options().write(true).custom_flags(O_DIRECT | O_DSYNC).open(path).unwrap();
    durable.write_all_at(bytes.all(BLOCK), 0).unwrap();
    assert!(device.durable_writes.load(SeqCst) + device.flushes.load(SeqCst) > before);
}

pub(crate) fn errors_arrive_and_pass(path: &Path, device: &Bytes) {
    let file = direct(path);
    let mut bytes = Aligned::new(BLOCK, 9);
    for always_waits in [false, true] {
        device.always_waits.store(always_waits, SeqCst);
        for errno in [Errno::IO, Errno::NOSPC] {
            device.error.store(u64::try_from(errno.raw_os_error()).unwrap(), SeqCst);
            let read = file.read_exact_at(bytes.all(BLOCK), 0).unwrap_err();
            let written = file.write_all_at(bytes.all(BLOCK), 0).unwrap_err();
            let flushed = file.sync_all().unwrap_err();
            assert_eq!(written.raw_os_error(), Some(errno.raw_os_error()));
            // Which error a failed read or flush is, is for the kernel to choose.
            assert!(read.raw_os_error().is_some() && flushed.raw_os_error().is_some());
        }
        device.error.store(0, SeqCst);
        file.write_all_at(bytes.all(BLOCK), 0).unwrap();
        file.read_exact_at(bytes.all(BLOCK), 0).unwrap();
    }
    device.always_waits.store(false, SeqCst);
}

pub(crate) fn nothing_is_beyond_the_end(path: &Path, device: &Bytes) {
    let file = direct(path);
    let mut bytes = Aligned::new(BLOCK, 9);
    assert_eq!(file.read_at(bytes.all(BLOCK), device.size_bytes()).unwrap(), 0);
    assert_eq!(file.write_at(bytes.all(BLOCK), device.size_bytes()).unwrap_err().raw_os_error(), Some(28));
}

/// A device whose reads hang holds up no other.
pub(crate) fn a_hung_device_holds_up_no_other(hung: (&Path, &Bytes), other: (&Path, &Bytes)) {
    hung.1.always_waits.store(true, SeqCst);
    hung.1.hang.close();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut bytes = Aligned::new(BLOCK, 0);
                direct(hung.0).read_exact_at(bytes.all(BLOCK), 0).unwrap();
            });
        }
        hung.1.hang.wait_held_up(4);
        is_same_as_bytes_under_random_work(other.0, other.1, 50);
        // Its own writes go on, too.
        let mut bytes = Aligned::new(BLOCK, 5);
        direct(hung.0).write_all_at(bytes.all(BLOCK), BLOCK as u64).unwrap();
        hung.1.hang.open();
    });
    hung.1.always_waits.store(false, SeqCst);
}

/// Memory is what it is, whoever maps it and whatever a balloon does to it.
pub(crate) fn memory_is_never_changed(path: &Path, device: &Bytes) {
    let before = device.content.read().unwrap().clone();
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    if let Ok(file) = File::options().read(true).write(true).open(path) {
        // Refused or ignored, but never done. What is written may fail only later, when it is synced.
        let _ = fallocate(file.as_fd(), flags, 0, BLOCK as u64);
        assert!(file.write_all_at(&[7; BLOCK], 0).and_then(|()| file.sync_all()).is_err());
    }
    let file = File::open(path).unwrap();
    let mut bytes = vec![0; before.len()];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes == before);
    assert!(*device.content.read().unwrap() == before);
}
