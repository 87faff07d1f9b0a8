//! Bytes that lie in several places, fetched from all of them at once.

use std::io;

use crate::device::Answer;

/// Whether what is read stays in the page cache of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// It will be read again, by others or by the same.
    Keep,
    /// Whoever asked keeps a copy: one is enough.
    Pass,
}

/// Where bytes can be read.
pub trait Store {
    /// Fills *buf* from byte *at* on.
    ///
    /// # Errors
    /// Whatever the file system says; `InvalidData` for wrong bytes, `UnexpectedEof` for missing ones.
    fn read(&self, buf: &mut [u8], at: u64, caching: Caching) -> io::Result<()>;

    /// The same if it takes no wait.
    ///
    /// # Errors
    /// As [`Store::read`].
    fn read_now(&self, buf: &mut [u8], at: u64, caching: Caching) -> io::Result<Answer>;

    /// The same, and else has the bytes fetched for a [`Store::read`] soon.
    ///
    /// # Errors
    /// As [`Store::read`].
    fn begin(&self, buf: &mut [u8], at: u64, caching: Caching) -> io::Result<Answer> {
        self.read_now(buf, at, caching)
    }
}

/// Some of the bytes that were asked for, and where they are.
pub struct Part<'a, 'b> {
    pub store: &'a dyn Store,
    pub buf: &'b mut [u8],
    pub at: u64,
    pub caching: Caching,
}

/// Fills all of *parts*. What is not at hand is on its way from everywhere before any of it is waited for.
///
/// # Errors
/// The first that any of them says.
pub fn read(parts: Vec<Part<'_, '_>>) -> io::Result<()> {
    let many = parts.len() > 1;
    let mut waiting = Vec::new();
    for part in parts {
        if !many || part.store.begin(part.buf, part.at, part.caching)? == Answer::WouldWait {
            waiting.push(part);
        }
    }
    waiting.into_iter().try_for_each(|part| part.store.read(part.buf, part.at, part.caching))
}

/// Fills all of *parts* if that takes no wait.
///
/// # Errors
/// As [`read`].
pub fn read_now(parts: Vec<Part<'_, '_>>) -> io::Result<Answer> {
    for part in parts {
        if part.store.read_now(part.buf, part.at, part.caching)? == Answer::WouldWait {
            return Ok(Answer::WouldWait);
        }
    }
    Ok(Answer::Done)
}

/// The first *length* bytes of *buf*, and the others.
///
/// # Errors
/// `InvalidInput` if there are fewer.
pub fn split(buf: &mut [u8], length: u64) -> io::Result<(&mut [u8], &mut [u8])> {
    let length = usize::try_from(length).map_err(|_| io::ErrorKind::InvalidInput)?;
    buf.split_at_mut_checked(length).ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Has *ready*, and notes what was asked for.
    struct Slow {
        ready: bool,
        calls: RefCell<Vec<&'static str>>,
    }

    impl Store for Slow {
        fn read(&self, buf: &mut [u8], _: u64, _: Caching) -> io::Result<()> {
            self.calls.borrow_mut().push("read");
            buf.fill(1);
            Ok(())
        }

        fn read_now(&self, buf: &mut [u8], _: u64, _: Caching) -> io::Result<Answer> {
            self.calls.borrow_mut().push("now");
            buf.fill(1);
            Ok(if self.ready { Answer::Done } else { Answer::WouldWait })
        }
    }

    #[test]
    fn all_is_under_way_before_any_is_waited_for() -> io::Result<()> {
        let stores = [false, true, false].map(|ready| Slow { ready, calls: RefCell::default() });
        let mut buf = [0; 3];
        let mut rest = &mut buf[..];
        let mut parts = Vec::new();
        for store in &stores {
            let (buf, behind) = split(rest, 1)?;
            rest = behind;
            parts.push(Part { store, buf, at: 0, caching: Caching::Keep });
        }
        read(parts)?;
        assert_eq!(
            stores.map(|store| store.calls.into_inner()),
            [vec!["now", "read"], vec!["now"], vec!["now", "read"]]
        );
        assert_eq!(buf, [1; 3]);
        assert!(split(&mut buf, 4).is_err());
        Ok(())
    }
}
