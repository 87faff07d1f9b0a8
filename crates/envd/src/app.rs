//! Everything the handlers share: one thread, so plain cells.

use std::cell::{Cell, RefCell};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use hyper::StatusCode;
use hyper::header::{AUTHORIZATION, HeaderMap};
use rustix::fs::{CWD, Mode, OFlags, openat};
use wire::init::Settings;
use wire::{Code, RpcError, json, secret};

use crate::accounts::{self, User};
use crate::answer::{self, Answer};
use crate::cgroup::Groups;
use crate::filesystem::Watchers;
use crate::metrics::CpuSample;
use crate::process::Registry;
use crate::store::Store;

/// What this daemon may change beyond processes and files.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Powers {
    /// Host name, machine id, accounts and other files below `/etc`.
    pub identity: bool,
    /// The clock and the random number generator, which no namespace separates from a host's.
    pub kernel: bool,
    /// Power off.
    pub power: bool,
}

pub(crate) struct App {
    settings: RefCell<Rc<Settings>>,
    store: Store,
    pub processes: Registry,
    pub watchers: Watchers,
    pub groups: Option<Groups>,
    pub powers: Powers,
    /// Whether SSH host keys are being renewed.
    pub renewing_keys: Cell<bool>,
    /// A directory of proc that stays valid whatever the workload mounts; set if children must lose protection.
    pub proc: Option<Arc<OwnedFd>>,
    /// Where output is read to before it is encoded; only used between two awaits.
    pub scratch: RefCell<Box<[u8]>>,
    /// Hard limit of open files, of the daemon and of what it starts.
    pub max_open_files: u64,
    pub started: Instant,
    pub cpu: Cell<CpuSample>,
}

const SCRATCH_BYTES: usize = 32 << 10;
const TOKEN_HEADER: &str = "x-access-token";

impl App {
    /// # Errors
    /// When the settings of a daemon before this one cannot be read.
    pub(crate) fn new(
        store: Store,
        groups: Option<Groups>,
        powers: Powers,
        protected: bool,
        max_open_files: u64,
    ) -> io::Result<Rc<Self>> {
        let proc = if protected {
            Some(openat(CWD, "/proc", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
        } else {
            None
        };
        Ok(Rc::new(Self {
            settings: RefCell::new(Rc::new(store.load()?)),
            store,
            processes: Registry::default(),
            watchers: Watchers::default(),
            groups,
            powers,
            renewing_keys: Cell::default(),
            proc: proc.map(Arc::new),
            scratch: RefCell::new(vec![0; SCRATCH_BYTES].into_boxed_slice()),
            max_open_files,
            started: Instant::now(),
            cpu: Cell::default(),
        }))
    }

    pub(crate) fn settings(&self) -> Rc<Settings> {
        self.settings.borrow().clone()
    }

    /// Makes *settings* those of this daemon and of the next, should this one die.
    ///
    /// # Errors
    /// When they cannot be kept; the old ones then stay.
    pub(crate) fn change_settings(&self, settings: Settings) -> io::Result<()> {
        if *self.settings() != settings {
            self.store.save(&settings)?;
            *self.settings.borrow_mut() = Rc::new(settings);
        }
        Ok(())
    }

    /// Kills what this daemon started; for one that ends in good order.
    pub(crate) fn end_workload(&self) {
        self.processes.kill_all();
        if let Some(groups) = &self.groups {
            groups.remove();
        }
    }

    /// The 401 to answer with when an access token is set and not given.
    pub(crate) fn token_refusal(&self, headers: &HeaderMap) -> Option<Answer> {
        let text = match self.token_given(headers) {
            Some(true) => return None,
            Some(false) => "the access token is wrong",
            None if self.settings().access_token.is_none() => return None,
            None => "an access token is needed",
        };
        Some(answer::error(StatusCode::UNAUTHORIZED, text))
    }

    /// Whether the right token was given; `None` when none was, or none is set.
    pub(crate) fn token_given(&self, headers: &HeaderMap) -> Option<bool> {
        let settings = self.settings();
        let expected = settings.access_token.as_deref()?;
        let given = headers.get(TOKEN_HEADER)?;
        Some(secret::matches(given.as_bytes(), expected.as_bytes()))
    }

    /// The user a remote call runs as: the one in its `Authorization`, or the default.
    ///
    /// # Errors
    /// `unauthenticated` for an unknown user or a header that is not understood.
    pub(crate) fn rpc_user(&self, headers: &HeaderMap) -> Result<User, RpcError> {
        let name = headers.get(AUTHORIZATION).map(|value| basic_user(value.as_bytes())).transpose()?;
        self.user(name.as_deref())
    }

    /// # Errors
    /// `unauthenticated` for an unknown user.
    pub(crate) fn user(&self, name: Option<&str>) -> Result<User, RpcError> {
        let settings = self.settings();
        let name = name.filter(|n| !n.is_empty()).or(settings.default_user.as_deref()).unwrap_or("root");
        match accounts::lookup(name) {
            Ok(Some(user)) => Ok(user),
            Ok(None) => Err(RpcError::new(Code::Unauthenticated, format!("there is no user {name}"))),
            Err(error) => Err(RpcError::internal(format!("the list of users cannot be read: {error}"))),
        }
    }
}

fn basic_user(header: &[u8]) -> Result<String, RpcError> {
    let refused = || RpcError::new(Code::Unauthenticated, "Authorization must be Basic with a user name");
    let text = std::str::from_utf8(header).map_err(|_| refused())?;
    let (scheme, encoded) = text.split_once(' ').ok_or_else(refused)?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return Err(refused());
    }
    let decoded =
        json::decode_base64(encoded.trim()).and_then(|bytes| String::from_utf8(bytes).ok()).ok_or_else(refused)?;
    Ok(decoded.split(':').next().unwrap_or("").to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_user_is_the_name_in_basic_credentials() {
        assert_eq!(basic_user(b"Basic dXNlcjo=").unwrap(), "user");
        assert_eq!(basic_user(b"basic cm9vdDpwdw==").unwrap(), "root");
        for bad in [&b"Bearer x"[..], b"Basic", b"Basic ***", b"\xff"] {
            assert_eq!(basic_user(bad).unwrap_err().code, Code::Unauthenticated);
        }
    }
}
