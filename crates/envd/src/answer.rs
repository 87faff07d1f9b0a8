//! Bodies and answers: what every handler returns.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Response, StatusCode};
use wire::{RpcError, frame};

/// The body of an answer: known as a whole, or made while it is sent.
pub(crate) enum Body {
    Whole(Bytes),
    Stream(Pin<Box<dyn HttpBody<Data = Bytes, Error = io::Error>>>),
}

pub(crate) type Answer = Response<Body>;

impl HttpBody for Body {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut *self {
            Self::Whole(bytes) if bytes.is_empty() => Poll::Ready(None),
            Self::Whole(bytes) => Poll::Ready(Some(Ok(Frame::data(std::mem::take(bytes))))),
            Self::Stream(stream) => stream.as_mut().poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_empty(),
            Self::Stream(stream) => stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Whole(bytes) => SizeHint::with_exact(bytes.len() as u64),
            Self::Stream(stream) => stream.size_hint(),
        }
    }
}

/// An answer without a body.
pub(crate) fn empty(status: StatusCode) -> Answer {
    let mut answer = Response::new(Body::Whole(Bytes::new()));
    *answer.status_mut() = status;
    answer
}

pub(crate) fn json(status: StatusCode, body: impl Into<Bytes>) -> Answer {
    let mut answer = Response::new(Body::Whole(body.into()));
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// `{"code": <the status>, "message"}`, the form of every error outside the RPC services.
pub(crate) fn error(status: StatusCode, message: &str) -> Answer {
    let body = serde_json::json!({"code": status.as_u16(), "message": message});
    json(status, body.to_string())
}

/// The error of a unary call.
pub(crate) fn rpc_error(failure: &RpcError) -> Answer {
    let status = StatusCode::from_u16(failure.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    json(status, failure.to_json())
}

/// A stream of frames. Its content type has no parameters, because clients compare all of it.
pub(crate) fn stream(body: impl HttpBody<Data = Bytes, Error = io::Error> + 'static) -> Answer {
    with_stream_type(Response::new(Body::Stream(Box::pin(body))))
}

/// A stream that holds only its end: errors of streaming calls come with status 200.
pub(crate) fn stream_error(failure: &RpcError) -> Answer {
    with_stream_type(Response::new(Body::Whole(frame::end(Some(failure)))))
}

/// The answer of a call that streams its requests: one empty message and the end.
pub(crate) fn stream_done() -> Answer {
    let frames = [frame::message(b"{}"), frame::end(None)].concat();
    with_stream_type(Response::new(Body::Whole(Bytes::from(frames))))
}

fn with_stream_type(mut answer: Answer) -> Answer {
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/connect+json"));
    answer
}
