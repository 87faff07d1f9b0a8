//! `POST /files`: one file as the body, or several in a form.
//!
//! The body runs through a chain of steps (decompress, cut the form into parts, write)
//! that knows nothing of the network: a chunk goes in on a worker thread that acts as
//! the user, and the next one is read only when it is on its way to the disk.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;

use flate2::write::MultiGzDecoder;
use http_body_util::BodyExt;
use hyper::StatusCode;
use hyper::body::Incoming;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use rustix::fs::{OFlags, XattrFlags};
use rustix::io::Errno;
use serde::Serialize;
use wire::multipart::{self, Event, Parser};
use wire::{json, path};

use super::{CHUNK_BYTES, Refused, Target};
use crate::answer::{self, Answer};
use crate::blocking::as_user;
use crate::http::drain;

/// Bytes gathered from the network before they are handed to a worker thread.
const BATCH_BYTES: usize = 2 * CHUNK_BYTES;
/// Compressed bytes decompressed at once: they can grow a thousandfold.
const INFLATE_STEP_BYTES: usize = 1 << 10;
const MAX_FILES: usize = 4096;
const METADATA_HEADER: &str = "x-metadata-";
/// Extended attributes that hold what clients call metadata.
pub(crate) const METADATA_ATTRIBUTE: &str = "user.e2b.";

#[derive(Serialize)]
struct Written {
    path: String,
    name: String,
    #[serde(rename = "type")]
    kind: &'static str,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    metadata: BTreeMap<String, String>,
}

pub(super) async fn receive(target: Target, headers: &HeaderMap, mut body: Incoming) -> Result<Answer, Refused> {
    let upload = match Upload::new(&target, headers) {
        Ok(upload) => upload,
        Err(refused) => {
            drain(body);
            return Err(refused);
        }
    };
    let credentials = target.user.credentials;
    // A task of its own: when the client leaves, what it began is still cleaned up.
    let receiving = tokio::task::spawn_local(async move {
        let mut upload = Some(upload);
        let result = run(&credentials, &mut upload, &mut body).await;
        if result.is_err() {
            drain(body);
            if let Some(upload) = upload {
                let _ = as_user(&credentials, move || upload.abandon()).await;
            }
        }
        result
    });
    let written = receiving.await.map_err(|e| lost(&e))??;
    Ok(answer::json(StatusCode::OK, json::write(&written)))
}

fn lost(error: &dyn std::fmt::Display) -> Refused {
    Refused::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string())
}

/// Feeds the whole body to *upload*, which is there again afterwards unless its thread was lost.
async fn run(
    credentials: &sys::credentials::Credentials,
    upload: &mut Option<Upload>,
    body: &mut Incoming,
) -> Result<Vec<Written>, Refused> {
    let mut batch = Vec::new();
    loop {
        let ended = match body.frame().await {
            None => true,
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    batch.extend_from_slice(data);
                }
                false
            }
            Some(Err(error)) => return Err(Refused::bad(format!("the request broke off: {error}"))),
        };
        if !ended && batch.len() < BATCH_BYTES {
            continue;
        }
        let Some(mut taken) = upload.take() else { return Err(lost(&"the upload was lost")) };
        let bytes = std::mem::take(&mut batch);
        let (back, result, reusable) = as_user(credentials, move || {
            let result = taken.feed(&bytes).and_then(|()| if ended { taken.finish().map(Some) } else { Ok(None) });
            (taken, result, bytes)
        })
        .await
        .map_err(|e| lost(&e))?;
        *upload = Some(back);
        batch = reusable;
        batch.clear();
        if let Some(written) = result? {
            return Ok(written);
        }
    }
}

/// The chain of steps, with what it has made so far.
struct Upload {
    home: String,
    workdir: Option<String>,
    metadata: Arc<BTreeMap<String, String>>,
    inflate: Option<Box<MultiGzDecoder<Vec<u8>>>>,
    shape: Shape,
    current: Option<Open>,
    written: Vec<Written>,
}

enum Shape {
    Raw { path: String },
    Form { parser: Parser, path: Option<String>, files: usize },
}

/// The file that is being written.
struct Open {
    file: File,
    path: String,
    /// It did not exist before, so it should not exist if the upload fails.
    created: bool,
}

impl Upload {
    fn new(target: &Target, headers: &HeaderMap) -> Result<Self, Refused> {
        let text = |name| headers.get(name).and_then(|v: &hyper::header::HeaderValue| v.to_str().ok()).unwrap_or("");
        let inflate = match text(CONTENT_ENCODING) {
            "" | "identity" => None,
            "gzip" => Some(Box::new(MultiGzDecoder::new(Vec::new()))),
            other => {
                let message = format!("the encoding {other} is not supported");
                return Err(Refused::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message));
            }
        };
        let content_type = text(CONTENT_TYPE);
        let essence = content_type.split(';').next().unwrap_or("").trim();
        let shape = if essence.eq_ignore_ascii_case("application/octet-stream") {
            let path = target.path.as_deref().filter(|p| !p.is_empty());
            Shape::Raw { path: target.resolve(path.ok_or_else(|| Refused::bad("the query has no path"))?)? }
        } else if let Some(boundary) = multipart::boundary(content_type) {
            let path = target.path.as_deref().filter(|p| !p.is_empty()).map(|p| target.resolve(p)).transpose()?;
            Shape::Form { parser: Parser::new(&boundary), path, files: 0 }
        } else {
            return Err(Refused::bad(format!(
                "files come as multipart/form-data or application/octet-stream, not {content_type:?}"
            )));
        };
        Ok(Self {
            home: target.user.home.clone(),
            workdir: target.workdir.clone(),
            metadata: Arc::new(metadata(headers)?),
            inflate,
            shape,
            current: None,
            written: Vec::new(),
        })
    }

    fn feed(&mut self, bytes: &[u8]) -> Result<(), Refused> {
        // The file is opened even for an empty body.
        if let (Shape::Raw { path }, None) = (&self.shape, &self.current) {
            self.current = Some(Open::create(path.clone(), &self.metadata)?);
        }
        if self.inflate.is_none() {
            return self.store(bytes);
        }
        for step in bytes.chunks(INFLATE_STEP_BYTES) {
            let Some(inflate) = &mut self.inflate else { break };
            inflate.write_all(step).map_err(|e| not_gzip(&e))?;
            let content = std::mem::take(inflate.get_mut());
            self.store(&content)?;
        }
        Ok(())
    }

    fn finish(&mut self) -> Result<Vec<Written>, Refused> {
        if let Some(mut inflate) = self.inflate.take() {
            inflate.try_finish().map_err(|e| not_gzip(&e))?;
            let content = std::mem::take(inflate.get_mut());
            self.store(&content)?;
        }
        if let Shape::Form { parser, files, .. } = &self.shape {
            parser.finish().map_err(Refused::bad)?;
            if *files == 0 {
                return Err(Refused::bad("the form has no part named file"));
            }
        }
        self.close();
        Ok(std::mem::take(&mut self.written))
    }

    fn store(&mut self, content: &[u8]) -> Result<(), Refused> {
        match &mut self.shape {
            Shape::Raw { .. } => self.write(content),
            Shape::Form { parser, .. } => {
                let events = parser.feed(content).map_err(Refused::bad)?;
                events.into_iter().try_for_each(|event| self.take(event))
            }
        }
    }

    fn take(&mut self, event: Event) -> Result<(), Refused> {
        match event {
            Event::Data(content) => self.write(&content),
            Event::PartEnd => {
                self.close();
                Ok(())
            }
            Event::Part { name, .. } if name != "file" => Ok(()),
            Event::Part { filename, .. } => {
                let path = self.part_path(filename)?;
                self.current = Some(Open::create(path, &self.metadata)?);
                Ok(())
            }
        }
    }

    /// The path in the query holds for one part; several need theirs in their file names.
    fn part_path(&mut self, filename: Option<String>) -> Result<String, Refused> {
        let Shape::Form { path, files, .. } = &mut self.shape else { return Err(Refused::bad("not a form")) };
        *files += 1;
        if *files > MAX_FILES {
            return Err(Refused::bad(format!("a form holds at most {MAX_FILES} files")));
        }
        match (path, filename) {
            (Some(_), _) if *files > 1 => Err(Refused::bad("the query has a path, but the form has several files")),
            (Some(path), _) => Ok(path.clone()),
            (None, Some(name)) if !name.is_empty() && !name.contains('\0') => {
                Ok(path::resolve(&name, &self.home, self.workdir.as_deref()))
            }
            (None, _) => Err(Refused::bad("a file has no path: give one in the query or as its file name")),
        }
    }

    /// Parts that are not files have nothing open; their content is skipped.
    fn write(&mut self, content: &[u8]) -> Result<(), Refused> {
        let Some(open) = &mut self.current else { return Ok(()) };
        open.file.write_all(content).map_err(|e| Refused::io(&open.path, &e))
    }

    fn close(&mut self) {
        if let Some(open) = self.current.take() {
            let name = Path::new(&open.path).file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
            self.written.push(Written { path: open.path, name, kind: "file", metadata: (*self.metadata).clone() });
        }
    }

    /// Removes the file that was not completed, if it is new.
    fn abandon(self) {
        if let Some(open) = self.current.filter(|open| open.created) {
            let _ = fs::remove_file(&open.path);
        }
    }
}

impl Open {
    fn create(path: String, metadata: &BTreeMap<String, String>) -> Result<Self, Refused> {
        let (file, created) = open_for_writing(&path).map_err(|e| Refused::io(&path, &e))?;
        let kind = file.metadata().map_err(|e| Refused::io(&path, &e))?;
        if !kind.is_file() {
            return Err(Refused::bad(format!("{path} is not a regular file")));
        }
        let open = Self { file, path, created };
        let prepared =
            open.file.set_len(0).map_err(|e| Refused::io(&open.path, &e)).and_then(|()| open.set_metadata(metadata));
        if prepared.is_err() && created {
            let _ = fs::remove_file(&open.path);
        }
        prepared.map(|()| open)
    }

    /// Replaces the whole set that the file had before.
    fn set_metadata(&self, metadata: &BTreeMap<String, String>) -> Result<(), Refused> {
        for name in attributes(&self.file) {
            let _ = rustix::fs::fremovexattr(&self.file, &*name);
        }
        for (key, value) in metadata {
            let name = format!("{METADATA_ATTRIBUTE}{key}");
            rustix::fs::fsetxattr(&self.file, &*name, value.as_bytes(), XattrFlags::empty()).map_err(|error| {
                match error {
                    Errno::NOTSUP => Refused::bad(format!("{}: this file system keeps no metadata", self.path)),
                    Errno::RANGE | Errno::TOOBIG | Errno::INVAL => {
                        Refused::bad(format!("the metadata {key} is too long"))
                    }
                    other => Refused::io(&self.path, &other.into()),
                }
            })?;
        }
        Ok(())
    }
}

fn attributes(file: &File) -> Vec<String> {
    let mut names = vec![0; 8 << 10];
    let Ok(length) = rustix::fs::flistxattr(file, &mut names) else { return Vec::new() };
    let all = names[..length].split(|&b| b == 0).map(|n| String::from_utf8_lossy(n).into_owned());
    all.filter(|name| name.starts_with(METADATA_ATTRIBUTE)).collect()
}

/// Opens without truncating, because it may turn out to be no file; makes missing parents.
fn open_for_writing(path: &str) -> io::Result<(File, bool)> {
    // Opening a pipe must not wait for its other end.
    let flags = i32::try_from(OFlags::NONBLOCK.bits() | OFlags::NOCTTY.bits()).unwrap_or(0);
    let mut options = File::options();
    options.write(true).custom_flags(flags);
    match options.open(path) {
        Ok(file) => return Ok((file, false)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) if error.raw_os_error() == Some(Errno::NXIO.raw_os_error()) => {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
        }
        Err(error) => return Err(error),
    }
    if let Some(parent) = Path::new(path).parent() {
        fs::create_dir_all(parent)?;
    }
    // A dangling link is followed, as writing to it would.
    options.create(true).open(path).map(|file| (file, true))
}

fn metadata(headers: &HeaderMap) -> Result<BTreeMap<String, String>, Refused> {
    let mut all = BTreeMap::new();
    for (name, value) in headers {
        if let Some(key) = name.as_str().strip_prefix(METADATA_HEADER) {
            let value = std::str::from_utf8(value.as_bytes())
                .map_err(|_| Refused::bad(format!("the metadata {key} is not UTF-8")))?;
            if key.is_empty() {
                return Err(Refused::bad("a metadata header has no name"));
            }
            all.insert(key.to_owned(), value.to_owned());
        }
    }
    Ok(all)
}

fn not_gzip(error: &io::Error) -> Refused {
    Refused::bad(format!("the body is not valid gzip: {error}"))
}
