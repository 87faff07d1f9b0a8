//! Immutable files, open for as long as there are descriptors for them.
//!
//! A host has more layers than a process may have descriptors. A file that was not used for a
//! while is closed and opened again when it is asked for, which nobody who reads it sees.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, IoSliceMut};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, Weak};

use layers::ReadAt;
use rustix::fs::{Advice, fadvise};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::device::Answer;
use crate::reading::Caching;

/// At most so many are open at once, apart from those being read at this moment.
pub struct Files {
    limit: usize,
    /// In the order in which they were opened; one that was used meanwhile is spared once.
    open: Mutex<VecDeque<Weak<Handle>>>,
}

/// One file, open or not.
pub struct Handle {
    path: PathBuf,
    file: RwLock<Option<File>>,
    used: AtomicBool,
    /// Memory images that are made of it.
    images: AtomicUsize,
    files: Arc<Files>,
}

/// `RWF_DONTCACHE`, Linux 6.14: what a read brought into the page cache leaves it again.
const DONT_CACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
/// Whether this kernel, and each file system that was asked, knows it.
static KNOWS_DONT_CACHE: AtomicBool = AtomicBool::new(true);

impl Files {
    pub fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self { limit: limit.max(1), open: Mutex::default() })
    }

    /// A file that exists at *path* and never changes. It is opened when it is read.
    pub fn handle(self: &Arc<Self>, path: PathBuf) -> Arc<Handle> {
        Arc::new(Handle {
            path,
            file: RwLock::new(None),
            used: AtomicBool::new(false),
            images: AtomicUsize::new(0),
            files: Arc::clone(self),
        })
    }

    /// How many are open.
    pub fn count(&self) -> usize {
        let open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.iter().filter(|handle| handle.strong_count() > 0).count()
    }

    fn opened(&self, handle: &Arc<Handle>) {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        open.push_back(Arc::downgrade(handle));
        // Twice round at most: the first time may only take away the sparing.
        for _ in 0..2 * open.len() {
            if open.len() <= self.limit {
                break;
            }
            let Some(oldest) = open.pop_front() else { break };
            let Some(candidate) = oldest.upgrade() else { continue };
            if candidate.used.swap(false, Ordering::Relaxed) || !candidate.close() {
                open.push_back(oldest);
            }
        }
    }
}

impl Handle {
    /// Closes it, unless it is being read.
    fn close(&self) -> bool {
        self.file.try_write().is_ok_and(|mut file| file.take().is_some())
    }

    fn get(self: &Arc<Self>) -> io::Result<Open<'_>> {
        loop {
            let file = self.file.read().unwrap_or_else(PoisonError::into_inner);
            if file.is_some() {
                if !self.used.load(Ordering::Relaxed) {
                    self.used.store(true, Ordering::Relaxed);
                }
                return Ok(Open(file));
            }
            drop(file);
            let mut file = self.file.write().unwrap_or_else(PoisonError::into_inner);
            if file.is_none() {
                let new = File::open(&self.path)?;
                // Guests decide what is read next; guessing only evicts what others use.
                fadvise(&new, 0, None, Advice::Random)?;
                *file = Some(new);
                drop(file);
                self.files.opened(self);
            }
        }
    }

    /// Fills *buf* with the bytes from *offset* on if that takes no wait for a disk.
    ///
    /// # Errors
    /// As [`ReadAt::read_exact_at`].
    pub fn read_now(self: &Arc<Self>, buf: &mut [u8], offset: u64, caching: Caching) -> io::Result<Answer> {
        read_cached(self.get()?.file(), buf, offset, caching)
    }

    /// Fills *buf* with the bytes from *offset* on, and leaves none of them in the page cache that were not there.
    ///
    /// # Errors
    /// As [`ReadAt::read_exact_at`].
    pub fn read_past_cache(self: &Arc<Self>, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let open = self.get()?;
        let mut done = 0;
        while done < buf.len() && KNOWS_DONT_CACHE.load(Ordering::Relaxed) {
            let rest = &mut [IoSliceMut::new(&mut buf[done..])];
            match preadv2(open.file(), rest, offset + done as u64, DONT_CACHE) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => done += read,
                Err(Errno::INTR) => (),
                Err(Errno::OPNOTSUPP | Errno::INVAL) => KNOWS_DONT_CACHE.store(false, Ordering::Relaxed),
                Err(e) => return Err(e.into()),
            }
        }
        if done < buf.len() {
            let (offset, rest) = (offset + done as u64, &mut buf[done..]);
            ReadAt::read_exact_at(open.file(), rest, offset)?;
            let length = std::num::NonZeroU64::new(rest.len() as u64);
            // Advice: it costs room and no bytes if it is not taken.
            let _ = fadvise(open.file(), offset, length, Advice::DontNeed);
        }
        Ok(())
    }

    /// Says that the range will be read soon.
    pub fn expect(self: &Arc<Self>, offset: u64, length: u64) {
        if let (Ok(open), Some(length)) = (self.get(), std::num::NonZeroU64::new(length)) {
            // Advice: whatever is wrong shows when it is read.
            let _ = fadvise(open.file(), offset, Some(length), Advice::WillNeed);
        }
    }

    /// One more memory image is made of it, or one less.
    pub fn count_image(&self, more: bool) {
        if more {
            self.images.fetch_add(1, Ordering::Relaxed);
        } else {
            self.images.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Whether no more than one memory image is made of it: that one keeps all that it reads.
    pub fn has_one_image(&self) -> bool {
        self.images.load(Ordering::Relaxed) <= 1
    }
}

struct Open<'a>(RwLockReadGuard<'a, Option<File>>);

impl Open<'_> {
    fn file(&self) -> &File {
        self.0.as_ref().expect("it was open, and the lock is held")
    }
}

/// Reads what the page cache has, all or nothing.
///
/// # Errors
/// As [`ReadAt::read_exact_at`].
pub fn read_cached(file: &File, buf: &mut [u8], offset: u64, caching: Caching) -> io::Result<Answer> {
    if buf.is_empty() {
        return Ok(Answer::Done);
    }
    let length = buf.len();
    // Even a read that does not wait makes the kernel fetch what is not there.
    let pass = caching == Caching::Pass && KNOWS_DONT_CACHE.load(Ordering::Relaxed);
    let flags = ReadWriteFlags::NOWAIT | if pass { DONT_CACHE } else { ReadWriteFlags::empty() };
    match preadv2(file, &mut [IoSliceMut::new(buf)], offset, flags) {
        Ok(read) if read == length => Ok(Answer::Done),
        // Too little: not all of it is cached, or the file ends, which a blocking read tells apart.
        Ok(_) | Err(Errno::AGAIN | Errno::OPNOTSUPP | Errno::INTR | Errno::NOSYS) => Ok(Answer::WouldWait),
        Err(e) => Err(e.into()),
    }
}

/// A shared handle is what a layer is read through.
#[derive(Clone)]
pub struct Shared(pub Arc<Handle>);

impl ReadAt for Shared {
    fn size(&self) -> io::Result<u64> {
        self.0.get()?.file().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        ReadAt::read_exact_at(self.0.get()?.file(), buf, offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_files_than_descriptors_are_all_readable() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let files = Files::new(4);
        let mut handles = Vec::new();
        for number in 0..20_u8 {
            let path = directory.path().join(number.to_string());
            std::fs::write(&path, [number; 8])?;
            handles.push(Shared(files.handle(path)));
        }
        for _ in 0..3 {
            for (number, handle) in handles.iter().enumerate() {
                let mut buf = [0; 8];
                handle.read_exact_at(&mut buf, 0)?;
                assert_eq!(usize::from(buf[7]), number);
                assert!(files.count() <= 4);
            }
        }
        Ok(())
    }

    #[test]
    fn a_file_that_ends_too_early_is_no_answer() -> io::Result<()> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("x");
        std::fs::write(&path, [1; 8])?;
        let handle = Files::new(1).handle(path);
        let mut buf = [0; 16];
        assert_eq!(handle.read_now(&mut buf, 0, Caching::Keep)?, Answer::WouldWait);
        let short = Shared(handle).read_exact_at(&mut buf, 0);
        assert_eq!(short.err().map(|e| e.kind()), Some(io::ErrorKind::UnexpectedEof));
        Ok(())
    }
}
