//! Requests of the FUSE kernel protocol (7.31 and later): bytes in, values out, and nothing else.
//!
//! Pure and total: any bytes give a value or [`Malformed`]. Numbers are in the byte order
//! of the machine, as the kernel writes them.

/// Length of what precedes the bytes of a write: its header and its parameters.
pub(super) const WRITE_PREFIX_BYTES: usize = HEADER_BYTES + 40;
pub(super) const HEADER_BYTES: usize = 40;

/// The highest bit of a `unique` says that a daemon before us may have begun the request.
pub(super) const RESENT: u64 = 1 << 63;

pub(super) mod opcode {
    pub(crate) const LOOKUP: u32 = 1;
    pub(crate) const FORGET: u32 = 2;
    pub(crate) const GETATTR: u32 = 3;
    pub(crate) const SETATTR: u32 = 4;
    pub(crate) const SYMLINK: u32 = 6;
    pub(crate) const MKNOD: u32 = 8;
    pub(crate) const MKDIR: u32 = 9;
    pub(crate) const UNLINK: u32 = 10;
    pub(crate) const RMDIR: u32 = 11;
    pub(crate) const RENAME: u32 = 12;
    pub(crate) const LINK: u32 = 13;
    pub(crate) const OPEN: u32 = 14;
    pub(crate) const READ: u32 = 15;
    pub(crate) const WRITE: u32 = 16;
    pub(crate) const STATFS: u32 = 17;
    pub(crate) const RELEASE: u32 = 18;
    pub(crate) const FSYNC: u32 = 20;
    pub(crate) const INIT: u32 = 26;
    pub(crate) const OPENDIR: u32 = 27;
    pub(crate) const READDIR: u32 = 28;
    pub(crate) const RELEASEDIR: u32 = 29;
    pub(crate) const FSYNCDIR: u32 = 30;
    pub(crate) const ACCESS: u32 = 34;
    pub(crate) const CREATE: u32 = 35;
    pub(crate) const INTERRUPT: u32 = 36;
    pub(crate) const DESTROY: u32 = 38;
    pub(crate) const IOCTL: u32 = 39;
    pub(crate) const NOTIFY_REPLY: u32 = 41;
    pub(crate) const BATCH_FORGET: u32 = 42;
    pub(crate) const FALLOCATE: u32 = 43;
    pub(crate) const RENAME2: u32 = 45;
    pub(crate) const TMPFILE: u32 = 51;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) opcode: u32,
    pub(super) unique: u64,
    pub(super) node: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Init {
    pub(super) major: u32,
    pub(super) minor: u32,
    pub(super) max_readahead: u32,
    pub(super) flags: u64,
}

/// What is asked. Numbers are as the kernel sent them: nothing is checked against any device yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operation<'a> {
    Init(Init),
    Lookup {
        name: &'a [u8],
    },
    /// Of one or many nodes. No answer; and nothing to do, since what a node is does not depend on who knows it.
    Forget,
    GetAttributes,
    SetAttributes {
        valid: u32,
        size: u64,
    },
    Open,
    OpenFolder,
    Read {
        offset: u64,
        size: u32,
    },
    Write {
        offset: u64,
        flags: u32,
        data: &'a [u8],
    },
    StatFs,
    /// Of a file or a folder.
    Release,
    Sync,
    SyncFolder,
    Allocate {
        mode: u32,
        offset: u64,
        length: u64,
    },
    ReadFolder {
        offset: u64,
        size: u32,
    },
    Interrupt {
        unique: u64,
    },
    Access,
    Control,
    Destroy,
    /// Cached pages that we never ask for. No answer.
    NotifyReply,
    /// Anything that would make, remove or rename a file.
    ChangeOfTree,
    Other,
}

/// A request shorter than its kind demands, or longer than it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Malformed;

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, Malformed> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Result<u64, Malformed> {
        self.take().map(u64::from_ne_bytes)
    }

    fn rest(self) -> &'a [u8] {
        self.0
    }

    /// A name that ends with NUL.
    fn name(self) -> Result<&'a [u8], Malformed> {
        let end = self.0.iter().position(|byte| *byte == 0).ok_or(Malformed)?;
        Ok(&self.0[..end])
    }
}

/// Splits *bytes*, one whole message, into its header and what follows it.
pub(super) fn header(bytes: &[u8]) -> Result<(Header, &[u8]), Malformed> {
    let mut fields = Fields(bytes);
    let length = fields.u32()?;
    let header = Header { opcode: fields.u32()?, unique: fields.u64()?, node: fields.u64()? };
    fields.take::<16>()?; // user, group, process, extensions
    if length as usize != bytes.len() {
        return Err(Malformed);
    }
    Ok((header, fields.rest()))
}

/// Reads the parameters of a request of kind *opcode*.
pub(super) fn operation(opcode: u32, body: &[u8]) -> Result<Operation<'_>, Malformed> {
    let mut fields = Fields(body);
    Ok(match opcode {
        opcode::INIT => Operation::Init(init(fields)?),
        opcode::LOOKUP => Operation::Lookup { name: fields.name()? },
        opcode::FORGET | opcode::BATCH_FORGET => Operation::Forget,
        opcode::GETATTR => Operation::GetAttributes,
        opcode::SETATTR => {
            let valid = fields.u32()?;
            fields.take::<12>()?;
            Operation::SetAttributes { valid, size: fields.u64()? }
        }
        opcode::OPEN => Operation::Open,
        opcode::OPENDIR => Operation::OpenFolder,
        opcode::READ | opcode::READDIR => {
            fields.u64()?;
            let (offset, size) = (fields.u64()?, fields.u32()?);
            if opcode == opcode::READ {
                Operation::Read { offset, size }
            } else {
                Operation::ReadFolder { offset, size }
            }
        }
        opcode::WRITE => write(fields)?,
        opcode::STATFS => Operation::StatFs,
        opcode::RELEASE | opcode::RELEASEDIR => Operation::Release,
        opcode::FSYNC => Operation::Sync,
        opcode::FSYNCDIR => Operation::SyncFolder,
        opcode::FALLOCATE => {
            fields.u64()?;
            let (offset, length, mode) = (fields.u64()?, fields.u64()?, fields.u32()?);
            Operation::Allocate { mode, offset, length }
        }
        opcode::INTERRUPT => Operation::Interrupt { unique: fields.u64()? },
        opcode::ACCESS => Operation::Access,
        opcode::IOCTL => Operation::Control,
        opcode::DESTROY => Operation::Destroy,
        opcode::NOTIFY_REPLY => Operation::NotifyReply,
        opcode::SYMLINK
        | opcode::MKNOD
        | opcode::MKDIR
        | opcode::UNLINK
        | opcode::RMDIR
        | opcode::RENAME
        | opcode::RENAME2
        | opcode::LINK
        | opcode::CREATE
        | opcode::TMPFILE => Operation::ChangeOfTree,
        _ => Operation::Other,
    })
}

fn init(mut fields: Fields<'_>) -> Result<Init, Malformed> {
    let (major, minor, max_readahead, low) = (fields.u32()?, fields.u32()?, fields.u32()?, fields.u32()?);
    // Kernels before 5.17 send no second half.
    let high = fields.u32().unwrap_or(0);
    Ok(Init { major, minor, max_readahead, flags: u64::from(low) | u64::from(high) << 32 })
}

fn write(mut fields: Fields<'_>) -> Result<Operation<'_>, Malformed> {
    fields.u64()?;
    let (offset, size) = (fields.u64()?, fields.u32()?);
    fields.take::<12>()?; // write flags, lock owner
    let flags = fields.u32()?;
    fields.u32()?;
    let data = fields.rest();
    if data.len() != size as usize {
        return Err(Malformed);
    }
    Ok(Operation::Write { offset, flags, data })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn message(opcode: u32, body: &[u8]) -> Vec<u8> {
        let length = u32::try_from(HEADER_BYTES + body.len()).unwrap();
        let mut bytes = Vec::new();
        bytes.extend(length.to_ne_bytes());
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(7_u64.to_ne_bytes());
        bytes.extend(3_u64.to_ne_bytes());
        bytes.extend([0; 16]);
        bytes.extend(body);
        bytes
    }

    #[test]
    fn a_read_is_read() {
        let mut body = vec![0; 8];
        body.extend(4096_u64.to_ne_bytes());
        body.extend(512_u32.to_ne_bytes());
        body.extend([0; 20]);
        let bytes = message(opcode::READ, &body);

        let (header, body) = header(&bytes).unwrap();

        assert_eq!(header, Header { opcode: opcode::READ, unique: 7, node: 3 });
        assert_eq!(operation(header.opcode, body), Ok(Operation::Read { offset: 4096, size: 512 }));
    }

    #[test]
    fn the_bytes_of_a_write_follow_its_prefix() {
        let mut body = vec![0; 8];
        body.extend(8192_u64.to_ne_bytes());
        body.extend(3_u32.to_ne_bytes());
        body.extend([0; 12]);
        body.extend(0o10000_u32.to_ne_bytes());
        body.extend([0; 4]);
        body.extend(b"abc");

        let write = operation(opcode::WRITE, &body);

        assert_eq!(write, Ok(Operation::Write { offset: 8192, flags: 0o10000, data: b"abc" }));
        assert_eq!(HEADER_BYTES + body.len() - 3, WRITE_PREFIX_BYTES);
    }

    #[test]
    fn a_write_with_more_or_less_bytes_than_it_says_is_malformed() {
        let mut body = vec![0; 16];
        body.extend(3_u32.to_ne_bytes());
        body.extend([0; 20]);
        for data in [&b"ab"[..], b"abcd"] {
            let body = [body.as_slice(), data].concat();
            assert_eq!(operation(opcode::WRITE, &body), Err(Malformed));
        }
    }

    #[test]
    fn a_message_is_as_long_as_it_says() {
        let mut bytes = message(opcode::GETATTR, &[0; 16]);
        assert!(header(&bytes).is_ok());
        bytes.push(0);
        assert_eq!(header(&bytes), Err(Malformed));
        assert_eq!(header(&bytes[..39]), Err(Malformed));
    }

    #[test]
    fn a_name_without_an_end_is_malformed() {
        assert_eq!(operation(opcode::LOOKUP, b"disks\0"), Ok(Operation::Lookup { name: b"disks" }));
        assert_eq!(operation(opcode::LOOKUP, b"disks"), Err(Malformed));
    }

    #[test]
    fn an_old_kernel_says_less_in_its_first_message() {
        let mut body = Vec::new();
        for word in [7_u32, 31, 131_072, 0b1001] {
            body.extend(word.to_ne_bytes());
        }
        let expected = Init { major: 7, minor: 31, max_readahead: 131_072, flags: 0b1001 };
        assert_eq!(operation(opcode::INIT, &body), Ok(Operation::Init(expected)));
    }

    proptest! {
        #[test]
        fn no_bytes_are_too_strange(bytes in proptest::collection::vec(any::<u8>(), 0..200), opcode in 0_u32..60) {
            let _ = header(&bytes);
            let _ = operation(opcode, &bytes);
        }
    }
}
