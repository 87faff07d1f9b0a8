//! Whether this kernel's ublk can be used: it must not be known to crash, and it must have what is needed.

use rustix::io::Errno;

use super::abi::{Features, command};
use crate::error::{Code, Error};

/// Kernels that crash when a device is added. They are refused before anything is asked of them.
fn known_to_crash(release: &str) -> bool {
    let version = release.split(['-', '+', '~']).next().unwrap_or(release);
    matches!(version, "6.18.4" | "6.18.5") || (version.starts_with("6.17.") && release.ends_with("-azure"))
}

/// # Errors
/// `unsupported`, with the reason, where this kernel cannot be used.
pub(super) fn check_release(release: &str) -> Result<(), Error> {
    if known_to_crash(release) {
        return Err(unsupported(format!("Linux {release} is known to crash when a ublk device is added")));
    }
    Ok(())
}

/// Opens the control device and asks what it can do.
///
/// # Errors
/// `unsupported`, with the reason.
pub(super) fn open() -> Result<(sys::ublk::Control, Features), Error> {
    check_release(&rustix::system::uname().release().to_string_lossy())?;
    let control = sys::ublk::Control::open().map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NOENT | Errno::NXIO | Errno::NODEV) => {
            unsupported("this kernel has no ublk, or its module ublk_drv is not loaded".into())
        }
        _ => unsupported(format!("/dev/ublk-control: {error}")),
    })?;
    let mut bytes = [0; 8];
    let asked = sys::ublk::Command { operation: command::FEATURES, device: u32::MAX, data: 0 };
    control.call(asked, &mut bytes).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::NOSYS | Errno::PERM) => unsupported("io_uring is switched off".into()),
        _ => unsupported(format!("ublk does not say what it can do: {error}")),
    })?;
    let features = Features(u64::from_ne_bytes(bytes));
    let missing = features.missing();
    if missing.is_empty() {
        Ok((control, features))
    } else {
        Err(unsupported(format!("ublk lacks {}", missing.join(", "))))
    }
}

fn unsupported(message: String) -> Error {
    Error::new(Code::Unsupported, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_that_crash_are_refused_and_their_neighbours_are_not() {
        for release in ["6.18.4", "6.18.5-1-default", "6.18.5+deb14-amd64", "6.17.0-1010-azure", "6.17.8-azure"] {
            assert_eq!(check_release(release).err().map(|error| error.code), Some(Code::Unsupported), "{release}");
        }
        for release in
            ["6.18.3", "6.18.44-fc", "6.18.50", "6.12.95+deb12-cloud-amd64", "6.17.0-14-generic", "6.8.0-azure", ""]
        {
            assert!(check_release(release).is_ok(), "{release}");
        }
    }
}
