//! Envelopes of a Connect stream: one flag byte, a big-endian length, a payload.

use bytes::{Buf, Bytes, BytesMut};

use crate::{Code, RpcError};

/// Bytes in front of each payload.
pub const HEADER_BYTES: usize = 5;
/// The longest payload that is accepted; files are not sent in frames.
pub const MAX_MESSAGE_BYTES: usize = 4 << 20;

const FLAG_COMPRESSED: u8 = 0x01;
const FLAG_END: u8 = 0x02;

/// One message of a stream, without its envelope.
#[derive(Debug, PartialEq, Eq)]
pub enum Frame {
    Message(Bytes),
    End(Bytes),
}

/// Builds one message frame in place, so that a payload is written only once.
pub struct Builder(Vec<u8>);

impl Builder {
    pub fn with_capacity(payload_bytes: usize) -> Self {
        let mut buffer = Vec::with_capacity(HEADER_BYTES + payload_bytes);
        buffer.extend_from_slice(&[0; HEADER_BYTES]);
        Self(buffer)
    }

    /// Where the payload is written to.
    pub fn payload(&mut self) -> &mut Vec<u8> {
        &mut self.0
    }

    pub fn finish(self) -> Bytes {
        self.close(0)
    }

    fn close(mut self, flags: u8) -> Bytes {
        // A frame of ours is a chunk of output or a small message: it always fits.
        let length = u32::try_from(self.0.len() - HEADER_BYTES).unwrap_or(u32::MAX);
        self.0[0] = flags;
        self.0[1..HEADER_BYTES].copy_from_slice(&length.to_be_bytes());
        Bytes::from(self.0)
    }
}

/// A message frame around *payload*.
pub fn message(payload: &[u8]) -> Bytes {
    let mut builder = Builder::with_capacity(payload.len());
    builder.payload().extend_from_slice(payload);
    builder.finish()
}

/// The frame that ends a stream, well or with an error.
pub fn end(error: Option<&RpcError>) -> Bytes {
    let payload = match error {
        None => String::from("{}"),
        Some(error) => format!("{{\"error\":{}}}", error.to_json()),
    };
    let mut builder = Builder::with_capacity(payload.len());
    builder.payload().extend_from_slice(payload.as_bytes());
    builder.close(FLAG_END)
}

/// Cuts a byte stream into frames, whatever the pieces it arrives in.
#[derive(Default)]
pub struct Decoder {
    buffer: BytesMut,
}

impl Decoder {
    pub fn feed(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Whether all that was fed has been taken as frames.
    pub fn is_empty(&self) -> bool {
        self.buffer.is_empty()
    }

    /// The next complete frame, or `None` when more bytes are needed.
    ///
    /// # Errors
    /// `resource_exhausted` for a frame over [`MAX_MESSAGE_BYTES`], `unimplemented`
    /// for a compressed one; the stream cannot be read on after either.
    pub fn take_frame(&mut self) -> Result<Option<Frame>, RpcError> {
        if self.buffer.len() < HEADER_BYTES {
            return Ok(None);
        }
        let flags = self.buffer[0];
        let length = u32::from_be_bytes([self.buffer[1], self.buffer[2], self.buffer[3], self.buffer[4]]) as usize;
        if flags & FLAG_COMPRESSED != 0 {
            return Err(RpcError::new(Code::Unimplemented, "compressed messages are not supported"));
        }
        if length > MAX_MESSAGE_BYTES {
            let text = format!("a message of {length} bytes is over the limit of {MAX_MESSAGE_BYTES}");
            return Err(RpcError::new(Code::ResourceExhausted, text));
        }
        if self.buffer.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        self.buffer.advance(HEADER_BYTES);
        let payload = self.buffer.split_to(length).freeze();
        Ok(Some(if flags & FLAG_END != 0 { Frame::End(payload) } else { Frame::Message(payload) }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_message_frame_has_flag_zero_and_a_big_endian_length() {
        assert_eq!(&message(b"{}")[..], b"\x00\x00\x00\x00\x02{}");
    }

    #[test]
    fn the_end_frame_carries_the_error() {
        assert_eq!(&end(None)[..], b"\x02\x00\x00\x00\x02{}");
        let failed = end(Some(&RpcError::not_found("no \"pid\"")));
        assert_eq!(failed[0], 2);
        assert_eq!(&failed[5..], br#"{"error":{"code":"not_found","message":"no \"pid\""}}"#);
    }

    #[derive(serde::Deserialize)]
    struct Vector {
        name: String,
        end: bool,
        payload: String,
        bytes: String,
    }

    #[test]
    fn frames_are_read_and_written_as_specified() {
        let text = include_bytes!("../../../spec/agent/frames.json");
        let vectors: Vec<Vector> = serde_json::from_slice(text).unwrap();
        for Vector { name, end, payload, bytes } in vectors {
            let bytes: Vec<u8> =
                (0..bytes.len()).step_by(2).map(|at| u8::from_str_radix(&bytes[at..at + 2], 16).unwrap()).collect();
            let payload = Bytes::from(payload);
            let mut decoder = Decoder::default();
            decoder.feed(&bytes);
            let frame = if end { Frame::End(payload.clone()) } else { Frame::Message(payload.clone()) };
            assert_eq!(decoder.take_frame().unwrap(), Some(frame), "{name}");
            assert!(decoder.is_empty(), "{name}");
            if !end {
                assert_eq!(message(&payload)[..], bytes[..], "{name}");
            } else if &payload[..] == b"{}" {
                assert_eq!(super::end(None)[..], bytes[..], "{name}");
            } else {
                assert_eq!(super::end(Some(&RpcError::not_found("no such process")))[..], bytes[..], "{name}");
            }
        }
    }

    #[test]
    fn a_compressed_or_oversized_frame_is_refused() {
        let mut decoder = Decoder::default();
        decoder.feed(&[1, 0, 0, 0, 0]);
        assert_eq!(decoder.take_frame().unwrap_err().code, Code::Unimplemented);

        let mut decoder = Decoder::default();
        decoder.feed(&[0, 0xff, 0, 0, 0]);
        assert_eq!(decoder.take_frame().unwrap_err().code, Code::ResourceExhausted);
    }

    proptest! {
        #[test]
        fn frames_survive_any_split(payloads in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..300), 0..8),
                                    cuts in prop::collection::vec(1usize..64, 1..40)) {
            let mut stream: Vec<u8> = payloads.iter().flat_map(|p| message(p).to_vec()).collect();
            stream.extend_from_slice(&end(None));
            let mut decoder = Decoder::default();
            let mut seen = Vec::new();
            let (mut at, mut turn) = (0, 0);
            while at < stream.len() {
                let next = (at + cuts[turn % cuts.len()]).min(stream.len());
                decoder.feed(&stream[at..next]);
                while let Some(frame) = decoder.take_frame().unwrap() { seen.push(frame); }
                (at, turn) = (next, turn + 1);
            }
            let mut expected: Vec<Frame> = payloads.into_iter().map(|p| Frame::Message(Bytes::from(p))).collect();
            expected.push(Frame::End(Bytes::from_static(b"{}")));
            prop_assert_eq!(seen, expected);
            prop_assert!(decoder.is_empty());
        }

        #[test]
        fn no_bytes_make_the_decoder_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut decoder = Decoder::default();
            decoder.feed(&bytes);
            while let Ok(Some(_)) = decoder.take_frame() {}
        }
    }
}
