//! Getting a run of bytes, whatever the network does on the way.
//!
//! An answer that breaks off is asked for again from where it broke off, one that is wrong from the start of the block.
//! It ends: with the last byte, or with a failure after so long without a block more.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep_until, timeout_at};

use super::BLOCK_BYTES;
use super::failure::Failure;
use super::target::Refusal;
use super::web::Web;

/// Wrong answers in a row, after which they are believed to be what the source has.
const MAX_WRONG: u32 = 3;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Bytes from one place of a file on.
pub(super) trait From {
    /// Some of *asked*, from its start on, and what the source calls the content.
    ///
    /// # Errors
    /// Why not, and when to come again.
    fn ask(&self, asked: &Range<u64>) -> impl Future<Output = Result<(Stream, Option<String>), Refusal>> + Send;

    /// Whether a refusal may be one for as long only as credentials are still on their way.
    fn may_be_let_in(&self) -> bool;
}

pub(super) struct Stream {
    pub length: u64,
    pub response: reqwest::Response,
}

/// Takes blocks as they come.
pub(super) trait Sink: Send {
    /// # Errors
    /// Corrupt for what the source calls by another name than before.
    fn begin(&mut self, validator: Option<&str>) -> Result<(), Failure>;

    /// # Errors
    /// Corrupt for bytes that are not those of *block*.
    fn block(&mut self, block: u64, bytes: Vec<u8>) -> Result<(), Failure>;

    fn failed(&mut self, failure: &Failure);
}

/// Where a run has got to.
struct Progress {
    /// The block that comes next, and what there is of it.
    block: u64,
    partial: Vec<u8>,
    validator: Option<String>,
    end: u64,
    deadline: Instant,
    wrong: u32,
    pause: Duration,
}

/// Gets *blocks* of a file of *size* bytes.
///
/// # Errors
/// The failure that was the last one.
pub(super) async fn run(
    web: &Arc<Web>,
    from: &impl From,
    sink: &mut impl Sink,
    blocks: Range<u64>,
    size: u64,
) -> Result<(), Failure> {
    let mut progress = Progress {
        block: blocks.start,
        partial: Vec::new(),
        validator: None,
        end: (blocks.end * BLOCK_BYTES).min(size),
        deadline: Instant::now() + web.patience.progress,
        wrong: 0,
        pause: FIRST_PAUSE,
    };
    while progress.block < blocks.end {
        let Err(refusal) = attempt(web, from, sink, &mut progress).await else { continue };
        sink.failed(&refusal.failure);
        progress.wait(web, from, refusal).await?;
    }
    Ok(())
}

async fn attempt(web: &Web, from: &impl From, sink: &mut impl Sink, progress: &mut Progress) -> Result<(), Refusal> {
    let asked = progress.block * BLOCK_BYTES + progress.partial.len() as u64..progress.end;
    let late = |_| Failure::Unreachable("no answer in time".into());
    let (mut stream, validator) = timeout_at(progress.deadline, from.ask(&asked)).await.map_err(late)??;
    if !progress.partial.is_empty() && validator != progress.validator {
        progress.partial.clear();
        return Err(Failure::Corrupt("the content changed on the way".into()).into());
    }
    sink.begin(validator.as_deref()).inspect_err(|_| progress.partial.clear())?;
    progress.validator = validator;
    let mut left = stream.length;
    while left > 0 {
        let part = timeout_at(progress.deadline, web.chunk(&mut stream.response)).await.map_err(late)??;
        let Some(part) = part else {
            return Err(Failure::Unreachable("the answer ends early".into()).into());
        };
        left =
            left.checked_sub(part.len() as u64).ok_or_else(|| Failure::Corrupt("more bytes than announced".into()))?;
        progress.take(&part, sink, web.patience.progress)?;
    }
    Ok(())
}

impl Progress {
    fn take(&mut self, mut part: &[u8], sink: &mut impl Sink, patience: Duration) -> Result<(), Failure> {
        while !part.is_empty() {
            let start = self.block * BLOCK_BYTES;
            let length = usize::try_from(BLOCK_BYTES.min(self.end - start)).unwrap_or(0);
            if self.partial.capacity() < length {
                self.partial.reserve_exact(length - self.partial.len());
            }
            let more = part.len().min(length - self.partial.len());
            self.partial.extend_from_slice(&part[..more]);
            part = &part[more..];
            if self.partial.len() == length {
                sink.block(self.block, std::mem::take(&mut self.partial))?;
                self.block += 1;
                (self.wrong, self.pause) = (0, FIRST_PAUSE);
                self.deadline = Instant::now() + patience;
            }
        }
        Ok(())
    }

    /// Waits for the next attempt, if there is to be one.
    async fn wait(&mut self, web: &Web, from: &impl From, refusal: Refusal) -> Result<(), Failure> {
        let Refusal { failure, after } = refusal;
        match failure {
            Failure::Absent(_) => return Err(failure),
            Failure::Corrupt(_) => {
                self.wrong += 1;
                if self.wrong >= MAX_WRONG {
                    return Err(failure);
                }
            }
            Failure::Denied(_) => {
                if !from.may_be_let_in() {
                    return Err(failure);
                }
                return timeout_at(self.deadline, web.vault.wait_changed()).await.map_err(|_| failure);
            }
            Failure::Unreachable(_) => (),
        }
        let until = Instant::now() + after.unwrap_or(self.pause).max(self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        if until >= self.deadline {
            return Err(failure);
        }
        sleep_until(until).await;
        Ok(())
    }
}
