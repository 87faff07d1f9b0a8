//! What a restarted daemon goes on with: settings in a memory file that the supervisor holds.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;

use rustix::fs::MemfdFlags;
use wire::init::Settings;

/// Two slots are written in turn and a header says which counts, so that a daemon
/// killed while it writes leaves the settings before it.
const HEADER_BYTES: u64 = 8;
const SLOT_BYTES: u64 = 8 << 20;

pub(crate) struct Store(File);

impl Store {
    /// A new, empty store.
    ///
    /// # Errors
    /// Those of `memfd_create`.
    pub(crate) fn create() -> io::Result<Self> {
        Ok(Self(File::from(rustix::fs::memfd_create("aenv-state", MemfdFlags::CLOEXEC)?)))
    }

    pub(crate) fn open(fd: OwnedFd) -> Self {
        Self(File::from(fd))
    }

    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// The settings last saved, or the initial ones.
    ///
    /// # Errors
    /// When what is there cannot be read back.
    pub(crate) fn load(&self) -> io::Result<Settings> {
        let turn = self.turn()?;
        if turn == 0 {
            return Ok(Settings::default());
        }
        let at = slot(turn);
        let mut length = [0; 8];
        self.0.read_exact_at(&mut length, at)?;
        let length = u64::from_le_bytes(length).min(SLOT_BYTES);
        let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
        self.0.read_exact_at(&mut bytes, at + 8)?;
        serde_json::from_slice(&bytes).map_err(io::Error::from)
    }

    /// # Errors
    /// When the settings are too large or there is no memory for them; the old ones stay.
    pub(crate) fn save(&self, settings: &Settings) -> io::Result<()> {
        let bytes = serde_json::to_vec(settings)?;
        if bytes.len() as u64 > SLOT_BYTES - 8 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the settings are too large"));
        }
        let turn = self.turn()? + 1;
        self.0.write_all_at(&(bytes.len() as u64).to_le_bytes(), slot(turn))?;
        self.0.write_all_at(&bytes, slot(turn) + 8)?;
        self.0.write_all_at(&turn.to_le_bytes(), 0)
    }

    fn turn(&self) -> io::Result<u64> {
        let mut turn = [0; 8];
        match self.0.read_exact_at(&mut turn, 0) {
            Ok(()) => Ok(u64::from_le_bytes(turn)),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(0),
            Err(error) => Err(error),
        }
    }
}

fn slot(turn: u64) -> u64 {
    HEADER_BYTES + (turn % 2) * SLOT_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_complete_save_counts() {
        let store = Store::create().unwrap();
        assert_eq!(store.load().unwrap(), Settings::default());
        for token in ["a", "a much longer token", "b"] {
            let settings = Settings { access_token: Some(token.into()), ..Settings::default() };
            store.save(&settings).unwrap();
            assert_eq!(store.load().unwrap(), settings);
        }
        // A save that is cut off before its last step.
        store.0.write_all_at(b"garbage", slot(4)).unwrap();
        assert_eq!(store.load().unwrap().access_token.as_deref(), Some("b"));
    }
}
