//! Devices as the driver manages them: made, started, found again, stopped and deleted.

use std::fs;
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;
use sys::ublk::Command;

use super::abi::{self, DESCRIPTION_BYTES, Description, Features, PARAMETERS_BYTES, command};
use super::kernel;
use crate::device::Kind;
use crate::error::{Code, Context, Error, Result};

pub(super) struct Control {
    device: sys::ublk::Control,
    pub(super) features: Features,
}

impl Control {
    /// # Errors
    /// `unsupported`, with the reason, where this kernel's ublk cannot be used.
    pub(super) fn open() -> Result<Self> {
        let (device, features) = kernel::open()?;
        Ok(Self { device, features })
    }

    fn call(&self, operation: u32, number: u32, data: u64, buffer: &mut [u8]) -> io::Result<u32> {
        self.device.call(Command { operation, device: number, data }, buffer)
    }

    /// Makes a device that is not started yet, with the number *wanted* if it is free, and gives its number.
    pub(super) fn add(&self, wanted: u32, depth: u16, ours: u64) -> Result<u32> {
        let try_number = |number: Option<u32>| {
            let mut description = Description::of_new(number, depth, self.features, ours);
            self.call(command::ADD, number.unwrap_or(u32::MAX), 0, &mut description)?;
            Ok(Description::read(&description).number)
        };
        let added = match try_number(Some(wanted)) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::EXIST) => try_number(None),
            other => other,
        };
        added.map_err(|error: io::Error| match Errno::from_io_error(&error) {
            // How the driver says that there are as many as its parameter allows; or all numbers are taken.
            Some(Errno::ACCESS | Errno::NOSPC) => {
                Error::new(Code::Exhausted, "the kernel allows no more ublk devices (ublk_drv.ublks_max)")
            }
            _ => Error::io("ublk: new device", error),
        })
    }

    pub(super) fn set_parameters(&self, number: u32, kind: Kind, size_bytes: u64) -> Result<()> {
        let mut parameters = abi::parameters(kind, size_bytes);
        self.call(command::SET_PARAMETERS, number, 0, &mut parameters).during("ublk: limits of a device").map(drop)
    }

    /// Makes the block device appear. Its queue has to be served already: the kernel waits for that.
    pub(super) fn start(&self, number: u32) -> Result<()> {
        let pid = u64::from(std::process::id());
        self.call(command::START, number, pid, &mut []).during("ublk: start of a device").map(drop)
    }

    /// Fails what is under way and takes the block device away. Its queue has to be served, or left by its process.
    pub(super) fn stop(&self, number: u32) -> Result<()> {
        self.call(command::STOP, number, 0, &mut []).during("ublk: stop of a device").map(drop)
    }

    /// Returns when the number is free again. Nobody may have the device of the queue open.
    pub(super) fn delete(&self, number: u32) -> Result<()> {
        match self.call(command::DELETE, number, 0, &mut []) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => Ok(()),
            other => other.during("ublk: deletion of a device").map(drop),
        }
    }

    pub(super) fn describe(&self, number: u32) -> Result<Description> {
        let mut bytes = [0; DESCRIPTION_BYTES];
        self.call(command::DEVICE_INFO, number, 0, &mut bytes).during("ublk: state of a device")?;
        Ok(Description::read(&bytes))
    }

    pub(super) fn size_bytes(&self, number: u32) -> Result<u64> {
        let mut bytes = abi::parameters(Kind::Disk, 0);
        self.call(command::GET_PARAMETERS, number, 0, &mut bytes[..PARAMETERS_BYTES])
            .during("ublk: size of a device")?;
        Ok(abi::size_of_parameters(&bytes))
    }

    pub(super) fn may_resize(&self) -> Result<()> {
        if self.features.can_resize() {
            return Ok(());
        }
        let message = "this kernel cannot change the size of a ublk device that is in use (Linux 6.16 can)";
        Err(Error::new(Code::Unsupported, message))
    }

    pub(super) fn resize(&self, number: u32, size_bytes: u64) -> Result<()> {
        self.may_resize()?;
        let sectors = size_bytes / abi::SECTOR_BYTES;
        self.call(command::UPDATE_SIZE, number, sectors, &mut []).during("ublk: new size of a device").map(drop)
    }

    /// Begins to take over a device whose process is gone. Says no as long as the kernel is not done with that process.
    pub(super) fn start_recovery(&self, number: u32) -> Result<bool> {
        match self.call(command::START_RECOVERY, number, 0, &mut []) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::BUSY) => Ok(false),
            other => other.during("ublk: device of an earlier daemon").map(|_| true),
        }
    }

    /// Lets requests flow again, first those that the earlier process has not answered.
    pub(super) fn end_recovery(&self, number: u32) -> Result<()> {
        let pid = u64::from(std::process::id());
        self.call(command::END_RECOVERY, number, pid, &mut []).during("ublk: device of an earlier daemon").map(drop)
    }

    /// The numbers of all devices, whosoever they are.
    pub(super) fn numbers() -> Result<Vec<u32>> {
        let entries = match fs::read_dir("/sys/class/ublk-char") {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            other => other.during("ublk devices")?,
        };
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Ok(names.filter_map(|name| name.strip_prefix("ublkc")?.parse().ok()).collect())
    }
}

/// Through which the daemon serves.
pub(super) fn queue_path(number: u32) -> PathBuf {
    format!("/dev/ublkc{number}").into()
}

/// What guests see.
pub(super) fn block_path(number: u32) -> PathBuf {
    format!("/dev/ublkb{number}").into()
}

/// Sets *name* of the block device's queue; such a setting only makes things better.
pub(super) fn tune(number: u32, name: &str, value: &str) {
    let _ = fs::write(format!("/sys/block/ublkb{number}/queue/{name}"), value);
}
