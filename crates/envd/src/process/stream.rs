//! The answer of `Start` and `Connect`: events of one process as frames.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use hyper::body::{Body, Frame};
use tokio::time::{Instant, Sleep, sleep_until};
use wire::{Code, RpcError, frame, process};

use super::broadcast::{Item, STALL_LIMIT, Subscription};

/// A body that ends with the process, at its deadline, or when its reader is too slow.
pub(super) struct EventStream {
    /// The start event, until it has been sent.
    first: Option<Bytes>,
    /// Gone once the last event has been sent.
    subscription: Option<Subscription>,
    keepalive: Duration,
    next_keepalive: Pin<Box<Sleep>>,
    deadline: Option<Pin<Box<Sleep>>>,
    ended: bool,
}

impl EventStream {
    pub(super) fn new(pid: u32, subscription: Subscription, keepalive: Duration, deadline: Option<Instant>) -> Self {
        Self {
            first: Some(process::start_frame(pid)),
            subscription: Some(subscription),
            keepalive,
            next_keepalive: Box::pin(sleep_until(Instant::now() + keepalive)),
            deadline: deadline.map(|at| Box::pin(sleep_until(at))),
            ended: false,
        }
    }

    fn end(&mut self, error: Option<&RpcError>) -> Bytes {
        self.ended = true;
        self.subscription = None;
        frame::end(error)
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Bytes> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(first);
        }
        if let Some(subscription) = &mut self.subscription {
            match subscription.poll_next(cx) {
                Poll::Ready(Item::Frame(bytes)) => return Poll::Ready(bytes),
                Poll::Ready(Item::Finished) => return Poll::Ready(self.end(None)),
                Poll::Ready(Item::CutOff) => {
                    let text = format!(
                        "output was lost: nothing was read for {} s while the process waited",
                        STALL_LIMIT.as_secs()
                    );
                    return Poll::Ready(self.end(Some(&RpcError::new(Code::ResourceExhausted, text))));
                }
                Poll::Pending => {}
            }
        }
        if let Some(deadline) = &mut self.deadline
            && deadline.as_mut().poll(cx).is_ready()
        {
            let error = RpcError::new(Code::DeadlineExceeded, "the time given for this call is over");
            return Poll::Ready(self.end(Some(&error)));
        }
        if self.next_keepalive.as_mut().poll(cx).is_ready() {
            return Poll::Ready(process::keepalive_frame());
        }
        Poll::Pending
    }
}

impl Body for EventStream {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        self.poll_event(cx).map(|bytes| {
            let at = Instant::now() + self.keepalive;
            self.next_keepalive.as_mut().reset(at);
            Some(Ok(Frame::data(bytes)))
        })
    }

    fn is_end_stream(&self) -> bool {
        self.ended
    }
}
