//! Frames: a length, and so many bytes.

use std::io::{self, Read, Write};

use crate::protocol::MAX_FRAME_BYTES;

/// The next frame; nothing at the end of the stream.
///
/// # Errors
/// `InvalidData` for a frame that is too long; `UnexpectedEof` for one that is cut off.
pub(super) fn read(from: &mut impl Read) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    let mut there = 0;
    while there < length.len() {
        match from.read(&mut length[there..]) {
            Ok(0) if there == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => there += count,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => (),
            Err(e) => return Err(e),
        }
    }
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_FRAME_BYTES {
        return Err(io::ErrorKind::InvalidData.into());
    }
    // Memory grows with what is sent, not with what is announced.
    let mut frame = Vec::new();
    from.take(length as u64).read_to_end(&mut frame)?;
    if frame.len() < length {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Some(frame))
}

/// # Errors
/// `InvalidData` for more than a frame can hold; what the stream says.
pub(super) fn write(to: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    let length = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= MAX_FRAME_BYTES);
    let length = length.ok_or(io::ErrorKind::InvalidData)?;
    to.write_all(&[&length.to_be_bytes(), bytes].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_read_as_it_was_written_and_nothing_else_is_one() -> io::Result<()> {
        let mut stream = Vec::new();
        write(&mut stream, b"abc")?;
        write(&mut stream, b"")?;
        let mut from = stream.as_slice();
        assert_eq!(read(&mut from)?, Some(b"abc".to_vec()));
        assert_eq!(read(&mut from)?, Some(Vec::new()));
        assert_eq!(read(&mut from)?, None);
        for (bytes, kind) in [
            ([0, 0, 0, 5, 1].as_slice(), io::ErrorKind::UnexpectedEof),
            (&[0, 0], io::ErrorKind::UnexpectedEof),
            (&[1, 0, 0, 1, 0], io::ErrorKind::InvalidData),
            (&[0xff; 8], io::ErrorKind::InvalidData),
        ] {
            assert_eq!(read(&mut &*bytes).err().map(|e| e.kind()), Some(kind), "{bytes:?}");
        }
        Ok(())
    }
}
