//! The Connect protocol on top of HTTP: unary calls, streaming calls, deadlines.

use std::str::FromStr;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::header::{CONTENT_ENCODING, CONTENT_TYPE, HeaderMap};
use hyper::{Request, StatusCode};
use serde::de::DeserializeOwned;
use tokio::time::Instant;
use wire::frame::{Decoder, Frame, MAX_MESSAGE_BYTES};
use wire::{Code, RpcError, json};

use crate::answer::{self, Answer};
use crate::http::drain;

/// How often a silent stream is shown to be alive, unless the client says.
const DEFAULT_KEEPALIVE: Duration = Duration::from_secs(90);
/// Connect allows ten digits of milliseconds.
const MAX_TIMEOUT_DIGITS: usize = 10;

/// Runs a unary call: reads its message, keeps its deadline, writes its answer or error.
pub(crate) async fn unary(
    request: Request<Incoming>,
    handler: impl AsyncFnOnce(&[u8]) -> Result<Vec<u8>, RpcError>,
) -> Answer {
    if let Some(refused) = wrong_type(request.headers(), "application/json") {
        drain(request.into_body());
        return refused;
    }
    let call = async {
        let deadline = deadline(request.headers())?;
        refuse_encoding(request.headers(), CONTENT_ENCODING.as_str())?;
        let work = async {
            let body = whole_message(request.into_body()).await?;
            handler(if body.is_empty() { b"{}" } else { &body }).await
        };
        match deadline {
            None => work.await,
            Some(at) => tokio::time::timeout_at(at, work)
                .await
                .unwrap_or_else(|_| Err(RpcError::new(Code::DeadlineExceeded, "the time given for this call is over"))),
        }
    };
    match call.await {
        Ok(body) => answer::json(StatusCode::OK, body),
        Err(failure) => answer::rpc_error(&failure),
    }
}

/// Runs a streaming call; a failure becomes the end of a stream, with status 200.
pub(crate) async fn streaming(
    request: Request<Incoming>,
    handler: impl AsyncFnOnce(Request<Incoming>) -> Result<Answer, RpcError>,
) -> Answer {
    if let Some(refused) = wrong_type(request.headers(), "application/connect+json") {
        drain(request.into_body());
        return refused;
    }
    if let Err(failure) = refuse_encoding(request.headers(), "connect-content-encoding") {
        drain(request.into_body());
        return answer::stream_error(&failure);
    }
    handler(request).await.unwrap_or_else(|failure| answer::stream_error(&failure))
}

/// The answer of calls that have nothing to say.
pub(crate) fn nothing() -> Vec<u8> {
    b"{}".to_vec()
}

pub(crate) fn no_such_method(name: &str) -> RpcError {
    RpcError::new(Code::Unimplemented, format!("there is no method {name}"))
}

/// What the headers of a streaming call ask for.
pub(crate) struct StreamOptions {
    pub keepalive: Duration,
    pub deadline: Option<Instant>,
}

impl StreamOptions {
    /// # Errors
    /// `invalid_argument` for headers that are not numbers.
    pub(crate) fn of(headers: &HeaderMap) -> Result<Self, RpcError> {
        let keepalive = match number::<u32>(headers, "keepalive-ping-interval")? {
            None | Some(0) => DEFAULT_KEEPALIVE,
            Some(seconds) => Duration::from_secs(seconds.into()),
        };
        Ok(Self { keepalive, deadline: deadline(headers)? })
    }
}

/// The one message of a call that streams only its answer, and the headers it came with.
///
/// # Errors
/// `invalid_argument` unless there is exactly one.
pub(crate) async fn single_message<T: DeserializeOwned>(
    request: Request<Incoming>,
) -> Result<(HeaderMap, T), RpcError> {
    let (parts, body) = request.into_parts();
    let mut messages = MessageReader::new(body);
    let message = only_message(&mut messages).await;
    if message.is_err() {
        messages.drain_in_background();
    }
    Ok((parts.headers, message?))
}

async fn only_message<T: DeserializeOwned>(messages: &mut MessageReader) -> Result<T, RpcError> {
    let Some(first) = messages.next().await? else {
        return Err(RpcError::invalid("the request has no message"));
    };
    let message = json::parse(&first)?;
    if messages.next().await?.is_some() {
        return Err(RpcError::invalid("the request has more than one message"));
    }
    Ok(message)
}

/// Messages of a request body, as they arrive.
pub(crate) struct MessageReader {
    body: Option<Incoming>,
    decoder: Decoder,
    ended: bool,
}

impl MessageReader {
    pub(crate) fn new(body: Incoming) -> Self {
        Self { body: Some(body), decoder: Decoder::default(), ended: false }
    }

    /// The next message, or `None` after the last.
    ///
    /// # Errors
    /// `canceled` when the client went away, `invalid_argument` for a body that ends within a frame.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, RpcError> {
        while !self.ended {
            match self.decoder.take_frame()? {
                Some(Frame::Message(payload)) => return Ok(Some(payload)),
                Some(Frame::End(_)) => self.ended = true,
                None => self.read_more().await?,
            }
        }
        Ok(None)
    }

    async fn read_more(&mut self) -> Result<(), RpcError> {
        let next = match &mut self.body {
            Some(body) => body.frame().await,
            None => None,
        };
        match next {
            Some(Ok(frame)) => {
                if let Some(data) = frame.data_ref() {
                    self.decoder.feed(data);
                }
                Ok(())
            }
            Some(Err(error)) => Err(RpcError::new(Code::Canceled, format!("the request broke off: {error}"))),
            None if self.decoder.is_empty() => {
                self.ended = true;
                Ok(())
            }
            None => Err(RpcError::invalid("the request ends within a message")),
        }
    }

    /// Goes on reading what nobody wants, so that the client gets to see the answer.
    pub(crate) fn drain_in_background(&mut self) {
        if let Some(body) = self.body.take() {
            drain(body);
        }
    }
}

async fn whole_message(mut body: Incoming) -> Result<Vec<u8>, RpcError> {
    let mut message = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|e| RpcError::new(Code::Canceled, format!("the request broke off: {e}")))?;
        let Some(data) = frame.data_ref() else { continue };
        if message.len() + data.len() > MAX_MESSAGE_BYTES {
            drain(body);
            let text = format!("the message is over the limit of {MAX_MESSAGE_BYTES} bytes");
            return Err(RpcError::new(Code::ResourceExhausted, text));
        }
        message.extend_from_slice(data);
    }
    Ok(message)
}

fn wrong_type(headers: &HeaderMap, expected: &str) -> Option<Answer> {
    let given = headers.get(CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or("");
    let essence = given.split(';').next().unwrap_or("").trim();
    (!essence.eq_ignore_ascii_case(expected)).then(|| {
        let text = format!("this call takes {expected}, not {}", if given.is_empty() { "nothing" } else { given });
        answer::error(StatusCode::UNSUPPORTED_MEDIA_TYPE, &text)
    })
}

fn refuse_encoding(headers: &HeaderMap, name: &str) -> Result<(), RpcError> {
    match headers.get(name).map(|v| v.to_str().unwrap_or("?")) {
        None | Some("" | "identity") => Ok(()),
        Some(other) => Err(RpcError::new(Code::Unimplemented, format!("the encoding {other} is not supported"))),
    }
}

fn deadline(headers: &HeaderMap) -> Result<Option<Instant>, RpcError> {
    let given = number::<u64>(headers, "connect-timeout-ms")?;
    Ok(given.map(|ms| Instant::now() + Duration::from_millis(ms)))
}

fn number<T: FromStr>(headers: &HeaderMap, name: &str) -> Result<Option<T>, RpcError> {
    let Some(value) = headers.get(name) else { return Ok(None) };
    let text = value.to_str().unwrap_or("?");
    let digits = text.len() <= MAX_TIMEOUT_DIGITS && text.bytes().all(|b| b.is_ascii_digit());
    match text.parse() {
        Ok(number) if digits => Ok(Some(number)),
        _ => Err(RpcError::invalid(format!("{name} is not a number of at most {MAX_TIMEOUT_DIGITS} digits"))),
    }
}
