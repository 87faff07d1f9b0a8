//! What is said to the ublk driver, byte for byte: commands, a device's description, its limits, and requests.
//!
//! Pure. Numbers are in the byte order of the machine.

use rustix::io::Errno;

use crate::device::Kind;

pub(super) const SECTOR_BYTES: u64 = 512;
/// Bytes of one request. The kernel splits what is longer.
pub(super) const MAX_REQUEST_BYTES: u32 = 512 << 10;
/// What one discard may cover: it costs no memory, only the time that it takes.
const MAX_DISCARD_SECTORS: u32 = 1 << 18;
/// Device numbers below this are valid.
pub(super) const NUMBERS: u32 = 1 << 20;

/// Commands of the control device.
pub(super) mod command {
    const fn read(number: u32) -> u32 {
        2 << 30 | BYTES << 16 | TYPE << 8 | number
    }

    const fn write(number: u32) -> u32 {
        3 << 30 | BYTES << 16 | TYPE << 8 | number
    }

    const BYTES: u32 = 32;
    const TYPE: u32 = b'u' as u32;

    pub(in super::super) const DEVICE_INFO: u32 = read(0x02);
    pub(in super::super) const ADD: u32 = write(0x04);
    pub(in super::super) const DELETE: u32 = write(0x05);
    pub(in super::super) const START: u32 = write(0x06);
    pub(in super::super) const STOP: u32 = write(0x07);
    pub(in super::super) const SET_PARAMETERS: u32 = write(0x08);
    pub(in super::super) const GET_PARAMETERS: u32 = read(0x09);
    pub(in super::super) const START_RECOVERY: u32 = write(0x10);
    pub(in super::super) const END_RECOVERY: u32 = write(0x11);
    pub(in super::super) const FEATURES: u32 = read(0x13);
    pub(in super::super) const UPDATE_SIZE: u32 = write(0x15);
}

/// What a driver can do, and what a device is asked to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Features(pub(super) u64);

impl Features {
    const USER_RECOVERY: u64 = 1 << 3;
    const RECOVERY_REISSUE: u64 = 1 << 4;
    const ENCODED_COMMANDS: u64 = 1 << 6;
    const USER_COPY: u64 = 1 << 7;
    const UPDATE_SIZE: u64 = 1 << 10;
    const NO_PARTITION_SCAN: u64 = 1 << 18;

    /// Every device needs these: Linux 6.5.
    const NEEDED: u64 = Self::USER_RECOVERY | Self::RECOVERY_REISSUE | Self::ENCODED_COMMANDS | Self::USER_COPY;

    /// What is needed and not there, in words.
    pub(super) fn missing(self) -> Vec<&'static str> {
        [
            (Self::USER_RECOVERY, "user recovery"),
            (Self::RECOVERY_REISSUE, "requests that are issued again"),
            (Self::ENCODED_COMMANDS, "encoded commands"),
            (Self::USER_COPY, "user copy"),
        ]
        .into_iter()
        .filter_map(|(bit, name)| (self.0 & bit == 0).then_some(name))
        .collect()
    }

    pub(super) fn can_resize(self) -> bool {
        self.0 & Self::UPDATE_SIZE != 0
    }

    /// What a new device is made with.
    fn wanted(self) -> u64 {
        Self::NEEDED | (self.0 & (Self::UPDATE_SIZE | Self::NO_PARTITION_SCAN))
    }

    fn recovers(self) -> bool {
        self.0 & Self::NEEDED == Self::NEEDED
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Not started, or stopped.
    Dead,
    Live,
    /// Nobody serves it, and requests wait.
    Quiesced,
    Other,
}

/// A device as the driver describes it (64 bytes).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Description {
    pub(super) number: u32,
    pub(super) depth: u16,
    pub(super) queues: u16,
    pub(super) state: State,
    pub(super) features: Features,
    /// The driver keeps it and makes nothing of it.
    pub(super) ours: u64,
}

pub(super) const DESCRIPTION_BYTES: usize = 64;

impl Description {
    /// Of a device to be added: number *number*, or any.
    pub(super) fn of_new(number: Option<u32>, depth: u16, driver: Features, ours: u64) -> [u8; DESCRIPTION_BYTES] {
        let mut bytes = [0; DESCRIPTION_BYTES];
        bytes[0..2].copy_from_slice(&1_u16.to_ne_bytes());
        bytes[2..4].copy_from_slice(&depth.to_ne_bytes());
        bytes[8..12].copy_from_slice(&MAX_REQUEST_BYTES.to_ne_bytes());
        bytes[12..16].copy_from_slice(&number.unwrap_or(u32::MAX).to_ne_bytes());
        bytes[24..32].copy_from_slice(&driver.wanted().to_ne_bytes());
        bytes[32..40].copy_from_slice(&ours.to_ne_bytes());
        bytes
    }

    pub(super) fn read(bytes: &[u8; DESCRIPTION_BYTES]) -> Self {
        let state = match half(bytes, 4) {
            0 => State::Dead,
            1 => State::Live,
            2 => State::Quiesced,
            _ => State::Other,
        };
        Self {
            number: word(bytes, 12),
            depth: half(bytes, 2),
            queues: half(bytes, 0),
            state,
            features: Features(long(bytes, 24)),
            ours: long(bytes, 32),
        }
    }

    /// Whether it is a device that another daemon can go on with.
    pub(super) fn recovers(&self) -> bool {
        self.features.recovers() && self.queues == 1 && self.depth > 0
    }
}

pub(super) const PARAMETERS_BYTES: usize = 60;

/// The limits of a device.
pub(super) fn parameters(kind: Kind, size_bytes: u64) -> [u8; PARAMETERS_BYTES] {
    const BASIC: u32 = 1;
    const DISCARD: u32 = 2;
    const READ_ONLY: u32 = 1;
    const VOLATILE_CACHE: u32 = 1 << 2;
    const FUA: u32 = 1 << 3;
    let (types, attributes, block_shift) = match kind {
        Kind::Disk => (BASIC | DISCARD, VOLATILE_CACHE | FUA, 9),
        Kind::Memory => (BASIC, READ_ONLY, 12),
    };
    let mut bytes = [0; PARAMETERS_BYTES];
    bytes[0..4].copy_from_slice(&60_u32.to_ne_bytes());
    bytes[4..8].copy_from_slice(&types.to_ne_bytes());
    bytes[8..12].copy_from_slice(&attributes.to_ne_bytes());
    bytes[12] = block_shift;
    bytes[13] = 12;
    bytes[14] = 16; // what is best read at once: 64 KiB
    bytes[15] = 12;
    bytes[16..20].copy_from_slice(&(MAX_REQUEST_BYTES >> 9).to_ne_bytes());
    bytes[24..32].copy_from_slice(&(size_bytes / SECTOR_BYTES).to_ne_bytes());
    if types & DISCARD != 0 {
        bytes[44..48].copy_from_slice(&4096_u32.to_ne_bytes());
        bytes[48..52].copy_from_slice(&MAX_DISCARD_SECTORS.to_ne_bytes());
        bytes[52..56].copy_from_slice(&MAX_DISCARD_SECTORS.to_ne_bytes());
        bytes[56..58].copy_from_slice(&1_u16.to_ne_bytes());
    }
    bytes
}

/// The size that the limits of a device say.
pub(super) fn size_of_parameters(bytes: &[u8; PARAMETERS_BYTES]) -> u64 {
    long(bytes, 24).saturating_mul(SECTOR_BYTES)
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    Read { offset: u64, length: usize },
    Write { offset: u64, length: usize, durable: bool },
    Flush,
    Discard { offset: u64, length: u64 },
}

impl Request {
    /// Reads what the kernel asks for.
    ///
    /// # Errors
    /// `EOPNOTSUPP` for what no device of ours is asked, `EINVAL` for a range that cannot be.
    pub(super) fn read(descriptor: &[u8; sys::ublk::DESCRIPTOR_BYTES]) -> Result<Self, Errno> {
        const FUA: u32 = 1 << 13;
        let operation = word(descriptor, 0);
        if operation & 0xff == 2 {
            return Ok(Self::Flush); // what is in the place of its range means nothing
        }
        let length = u64::from(word(descriptor, 4)) * SECTOR_BYTES;
        let offset = long(descriptor, 8).checked_mul(SECTOR_BYTES).ok_or(Errno::INVAL)?;
        offset.checked_add(length).ok_or(Errno::INVAL)?;
        let bytes = || {
            let fits = length > 0 && length <= u64::from(MAX_REQUEST_BYTES);
            usize::try_from(length).ok().filter(|_| fits).ok_or(Errno::INVAL)
        };
        match operation & 0xff {
            0 => Ok(Self::Read { offset, length: bytes()? }),
            1 => Ok(Self::Write { offset, length: bytes()?, durable: operation & FUA != 0 }),
            3 | 5 => Ok(Self::Discard { offset, length }),
            _ => Err(Errno::OPNOTSUPP),
        }
    }
}

/// Where in the device's file the bytes of the request with *tag* are.
pub(super) fn bytes_of(tag: u16) -> u64 {
    0x8000_0000 + (u64::from(tag) << 25)
}

fn half(bytes: &[u8], place: usize) -> u16 {
    u16::from_ne_bytes([bytes[place], bytes[place + 1]])
}

fn word(bytes: &[u8], place: usize) -> u32 {
    u32::from(half(bytes, place)) | u32::from(half(bytes, place + 2)) << 16
}

fn long(bytes: &[u8], place: usize) -> u64 {
    u64::from(word(bytes, place)) | u64::from(word(bytes, place + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn descriptor(operation: u32, sectors: u32, start: u64) -> [u8; 24] {
        let mut bytes = [0; 24];
        bytes[0..4].copy_from_slice(&operation.to_ne_bytes());
        bytes[4..8].copy_from_slice(&sectors.to_ne_bytes());
        bytes[8..16].copy_from_slice(&start.to_ne_bytes());
        bytes
    }

    #[test]
    fn commands_have_the_numbers_of_the_driver() {
        assert_eq!(command::ADD, 0xc020_7504);
        assert_eq!(command::DEVICE_INFO, 0x8020_7502);
        assert_eq!(command::FEATURES, 0x8020_7513);
    }

    #[test]
    fn requests_are_read_as_the_kernel_writes_them() {
        assert_eq!(Request::read(&descriptor(0, 8, 16)), Ok(Request::Read { offset: 8192, length: 4096 }));
        let durable = descriptor(1 | 1 << 13 | 1 << 8, 1, 1);
        assert_eq!(Request::read(&durable), Ok(Request::Write { offset: 512, length: 512, durable: true }));
        assert_eq!(Request::read(&descriptor(2, 0, u64::MAX)), Ok(Request::Flush));
        for operation in [3, 5, 5 | 1 << 15] {
            let discard = Request::Discard { offset: 0, length: 1 << 20 };
            assert_eq!(Request::read(&descriptor(operation, 2048, 0)), Ok(discard));
        }
    }

    #[test]
    fn requests_that_cannot_be_are_refused() {
        for (operation, sectors, start, error) in [
            (0, 0, 0, Errno::INVAL),
            (1, 1025, 0, Errno::INVAL),
            (0, 1, u64::MAX, Errno::INVAL),
            (3, 1, u64::MAX / 512, Errno::INVAL),
            (4, 1, 0, Errno::OPNOTSUPP),
            (15, 1, 0, Errno::OPNOTSUPP),
        ] {
            assert_eq!(Request::read(&descriptor(operation, sectors, start)), Err(error));
        }
    }

    #[test]
    fn a_description_is_read_as_it_was_written() {
        let all = Features(u64::MAX);
        let bytes = Description::of_new(Some(7), 64, all, 0x1234_5678_9abc_def0);
        let read = Description::read(&bytes);
        assert_eq!((read.number, read.depth, read.queues, read.ours), (7, 64, 1, 0x1234_5678_9abc_def0));
        assert!(read.recovers() && read.state == State::Dead);
        assert_eq!(read.features.0, 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 18);
    }

    #[test]
    fn what_a_driver_lacks_is_named() {
        assert_eq!(Features(0).missing().len(), 4);
        assert_eq!(Features(!(1 << 7)).missing(), ["user copy"]);
        assert!(Features(0x2ff).missing().is_empty() && !Features(0x2ff).can_resize());
    }

    #[test]
    fn limits_say_the_size() {
        assert_eq!(size_of_parameters(&parameters(Kind::Disk, 1 << 30)), 1 << 30);
        assert_eq!(parameters(Kind::Memory, 4096)[8..12], 1_u32.to_ne_bytes());
    }

    proptest! {
        #[test]
        fn no_descriptor_is_too_much(bytes: [u8; 24]) {
            let _ = Request::read(&bytes);
        }
    }
}
