//! `GET /files`: a file or a part of it.

use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{ACCEPT_RANGES, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, HeaderMap, HeaderValue, RANGE};
use hyper::{Response, StatusCode};
use rustix::fs::OFlags;
use tokio::task::JoinHandle;
use wire::range::{self, Range};

use super::{CHUNK_BYTES, Refused, Target};
use crate::answer::{self, Answer};
use crate::blocking::as_user;

pub(super) async fn send(target: Target, headers: &HeaderMap) -> Result<Answer, Refused> {
    let path = target.resolve(target.path.as_deref().unwrap_or(""))?;
    let range = headers.get(RANGE).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let (name, credentials) = (path.clone(), target.user.credentials);
    let opened = as_user(&credentials, move || open(&name, range.as_deref())).await;
    match opened.and_then(|opened| opened).map_err(|e| Refused::io(&path, &e))? {
        Opened::Directory => Err(Refused::bad(format!("{path} is a directory"))),
        Opened::Special => Err(Refused::bad(format!("{path} is not a regular file"))),
        Opened::Unsatisfiable { size } => {
            let mut refused = answer::error(StatusCode::RANGE_NOT_SATISFIABLE, &format!("{path} has {size} bytes"));
            refused.headers_mut().insert(CONTENT_RANGE, header(format!("bytes */{size}")));
            Ok(refused)
        }
        Opened::Whole(content) => Ok(with_headers(Response::new(answer::Body::Whole(content)))),
        Opened::File(body) => Ok(with_headers(Response::new(answer::Body::Stream(Box::pin(body))))),
        Opened::Part { body, start, length, size } => {
            let mut part = with_headers(Response::new(answer::Body::Stream(Box::pin(body))));
            *part.status_mut() = StatusCode::PARTIAL_CONTENT;
            let last = start + length - 1;
            part.headers_mut().insert(CONTENT_RANGE, header(format!("bytes {start}-{last}/{size}")));
            Ok(part)
        }
    }
}

fn with_headers(mut answer: Answer) -> Answer {
    let length = hyper::body::Body::size_hint(answer.body()).exact();
    let headers = answer.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
    if let Some(length) = length {
        headers.insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    answer
}

fn header(text: String) -> HeaderValue {
    HeaderValue::try_from(text).unwrap_or_else(|_| HeaderValue::from_static(""))
}

enum Opened {
    Directory,
    Special,
    Unsatisfiable { size: u64 },
    Whole(Bytes),
    File(FileBody),
    Part { body: FileBody, start: u64, length: u64, size: u64 },
}

/// Opens the file and reads its first chunk, so that small files need no second step.
fn open(path: &str, range: Option<&str>) -> io::Result<Opened> {
    // Opening a pipe must not wait for its other end.
    let flags = i32::try_from(OFlags::NONBLOCK.bits() | OFlags::NOCTTY.bits()).unwrap_or(0);
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let metadata = file.metadata()?;
    if metadata.is_dir() {
        return Ok(Opened::Directory);
    }
    if !metadata.is_file() {
        return Ok(Opened::Special);
    }
    let size = metadata.len();
    if size == 0 {
        return without_size(file);
    }
    match range::parse(range, size) {
        Range::Unsatisfiable => Ok(Opened::Unsatisfiable { size }),
        Range::Part { start, length } => {
            Ok(Opened::Part { body: FileBody::new(file, start, Some(length), Bytes::new()), start, length, size })
        }
        Range::Whole if size <= CHUNK_BYTES as u64 => {
            let content = read_chunk(&file, 0, usize::try_from(size).unwrap_or(CHUNK_BYTES))?;
            Ok(Opened::Whole(content))
        }
        Range::Whole => Ok(Opened::File(FileBody::new(file, 0, Some(size), Bytes::new()))),
    }
}

/// An empty file, or one of proc or sysfs, which do not tell their size.
fn without_size(file: File) -> io::Result<Opened> {
    let first = read_chunk(&file, 0, CHUNK_BYTES)?;
    if first.len() < CHUNK_BYTES {
        let rest = read_chunk(&file, first.len() as u64, CHUNK_BYTES)?;
        if rest.is_empty() {
            return Ok(Opened::Whole(first));
        }
        let offset = (first.len() + rest.len()) as u64;
        let both = Bytes::from([first, rest].concat());
        return Ok(Opened::File(FileBody::new(file, offset, None, both)));
    }
    let offset = first.len() as u64;
    Ok(Opened::File(FileBody::new(file, offset, None, first)))
}

fn read_chunk(file: &File, offset: u64, length: usize) -> io::Result<Bytes> {
    let mut bytes = vec![0; length];
    let mut filled = 0;
    while filled < length {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    bytes.truncate(filled);
    Ok(Bytes::from(bytes))
}

type Reading = JoinHandle<(File, io::Result<Bytes>)>;

/// A file that is read one chunk at a time, as fast as the client takes it.
struct FileBody {
    /// Here when no read is going on.
    file: Option<File>,
    reading: Option<Reading>,
    /// Read already, to be sent first.
    first: Bytes,
    offset: u64,
    /// Bytes still to be read; unknown for files that do not tell their size.
    remaining: Option<u64>,
    ended: bool,
}

impl FileBody {
    fn new(file: File, offset: u64, remaining: Option<u64>, first: Bytes) -> Self {
        Self { file: Some(file), reading: None, first, offset, remaining, ended: false }
    }

    fn start_reading(&mut self) {
        let Some(file) = self.file.take() else { return };
        let wanted =
            self.remaining.map_or(CHUNK_BYTES, |left| usize::try_from(left).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES));
        let offset = self.offset;
        self.reading = Some(tokio::task::spawn_blocking(move || {
            let chunk = read_chunk(&file, offset, wanted);
            (file, chunk)
        }));
    }

    fn take(&mut self, chunk: io::Result<Bytes>) -> Option<io::Result<Frame<Bytes>>> {
        let chunk = match chunk {
            Ok(chunk) => chunk,
            Err(error) => {
                self.ended = true;
                return Some(Err(error));
            }
        };
        if chunk.is_empty() {
            self.ended = true;
            // The length was promised; the connection has to break so that the client notices.
            return self
                .remaining
                .map(|_| Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter")));
        }
        self.offset += chunk.len() as u64;
        if let Some(left) = &mut self.remaining {
            *left -= chunk.len() as u64;
            self.ended = *left == 0;
        }
        Some(Ok(Frame::data(chunk)))
    }
}

impl Body for FileBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        if !self.first.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut self.first)))));
        }
        if self.reading.is_none() {
            self.start_reading();
        }
        let Some(reading) = &mut self.reading else { return Poll::Ready(None) };
        let Poll::Ready(result) = Pin::new(reading).poll(cx) else { return Poll::Pending };
        self.reading = None;
        let chunk = match result {
            Ok((file, chunk)) => {
                self.file = Some(file);
                chunk
            }
            Err(lost) => Err(io::Error::other(lost)),
        };
        let taken = self.take(chunk);
        if !self.ended {
            // While this chunk is on its way, the next one is read.
            self.start_reading();
        }
        Poll::Ready(taken)
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }

    fn size_hint(&self) -> SizeHint {
        self.remaining.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
