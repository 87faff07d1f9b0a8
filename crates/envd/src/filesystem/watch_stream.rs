//! The answer of `WatchDir`.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};
use wire::filesystem::WatchEvent;
use wire::{Code, RpcError, frame, json};

use super::watcher::Watcher;

/// A body that ends at its deadline or when changes were lost.
pub(super) struct WatchStream {
    started: bool,
    /// Gone once the end has been sent.
    watcher: Option<Rc<Watcher>>,
    keepalive: Duration,
    next_keepalive: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl WatchStream {
    pub(super) fn new(watcher: Rc<Watcher>, keepalive: Duration, deadline: Option<Instant>) -> Self {
        Self {
            started: false,
            watcher: Some(watcher),
            keepalive,
            next_keepalive: Box::pin(sleep_until(Instant::now() + keepalive)),
            deadline: deadline.map(|at| Box::pin(sleep_until(at))),
        }
    }

    fn poll_message(&mut self, watcher: &Watcher, cx: &mut Context<'_>) -> Poll<Bytes> {
        if !std::mem::replace(&mut self.started, true) {
            return Poll::Ready(frame::message(b"{\"start\":{}}"));
        }
        match watcher.poll_next(cx) {
            Poll::Ready(Ok(event)) => {
                return Poll::Ready(frame::message(&json::write(&WatchEvent { filesystem: &event })));
            }
            Poll::Ready(Err(error)) => return Poll::Ready(self.end(&error)),
            Poll::Pending => {}
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(
                self.end(&RpcError::new(Code::DeadlineExceeded, "the time given for this call is over")),
            );
        }
        if self.next_keepalive.as_mut().poll(cx).is_ready() {
            return Poll::Ready(frame::message(b"{\"keepalive\":{}}"));
        }
        Poll::Pending
    }

    fn end(&mut self, error: &RpcError) -> Bytes {
        self.watcher = None;
        frame::end(Some(error))
    }
}

impl Body for WatchStream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let Some(watcher) = self.watcher.clone() else { return Poll::Ready(None) };
        self.poll_message(&watcher, cx).map(|bytes| {
            let at = Instant::now() + self.keepalive;
            self.next_keepalive.as_mut().reset(at);
            Some(Ok(Frame::data(bytes)))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.watcher.is_none()
    }
}
