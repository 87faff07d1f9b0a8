//! One remote file as something to read from: the blocks that are here, and a flight for each that is not.
//!
//! Whoever finds a block missing starts its flight or joins the one there is; all get what it brings,
//! kept or not. A failure is told to those who waited for it, and to nobody after them.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use layers::ReadAt;
use sha2::{Digest as _, Sha256};

use super::BLOCK_BYTES;
use super::ahead::Ahead;
use super::counters::Counters;
use super::failure::Failure;
use super::fetch::{self, Sink, Stream};
use super::flight::{Flight, Landed};
use super::gate::{Gate, Pass, Priority};
use super::source::Remote;
use super::stored::Stored;
use super::target::{Refusal, Target};
use super::web::Web;
use crate::device::Answer;
use crate::names::LayerName;

/// Blocks that are asked for at once.
const MAX_RUN: u64 = 16;
/// Blocks on their way, beyond which nothing is guessed.
const MAX_GUESSED: usize = 64;

/// What all remote files have in common.
pub struct Common {
    pub web: Arc<Web>,
    pub gate: Arc<Gate>,
    pub counters: Arc<Counters>,
    pub keeping: SyncSender<Keep>,
}

/// A block that has come and is to be kept.
pub struct Keep {
    pub object: Arc<Object>,
    pub block: u64,
    pub bytes: Arc<Vec<u8>>,
    pub flight: Arc<Flight>,
}

pub struct Object {
    name: LayerName,
    remote: Remote,
    target: Target,
    common: Arc<Common>,
    stored: Arc<Stored>,
    /// Known from an earlier daemon, whose credentials are still to be told to this one.
    inherited: bool,
    flights: Mutex<HashMap<u64, Arc<Flight>>>,
    ahead: Mutex<Ahead>,
    /// The whole was here once, and was not what its digest says.
    condemned: Mutex<bool>,
}

impl Object {
    pub fn new(
        name: LayerName,
        remote: Remote,
        target: Target,
        common: Arc<Common>,
        stored: Arc<Stored>,
        inherited: bool,
    ) -> Arc<Self> {
        let (flights, ahead, condemned) = (Mutex::default(), Mutex::default(), Mutex::default());
        Arc::new(Self { name, remote, target, common, stored, inherited, flights, ahead, condemned })
    }

    pub fn name(&self) -> &LayerName {
        &self.name
    }

    pub fn remote(&self) -> &Remote {
        &self.remote
    }

    pub fn stored(&self) -> &Stored {
        &self.stored
    }

    pub fn blocks(&self) -> u64 {
        self.remote.size_bytes.div_ceil(BLOCK_BYTES)
    }

    /// Fills *buf* from byte *offset* on; waits for the network where it must.
    ///
    /// # Errors
    /// `UnexpectedEof` beyond the end; any [`Failure`].
    pub fn read(self: &Arc<Self>, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let blocks = self.blocks_of(buf.len(), offset)?;
        self.check_condemned()?;
        self.stored.touch();
        let mut flights = self.start(blocks.clone(), Priority::Foreground);
        self.look_ahead(&blocks);
        for (block, part, at) in parts(buf, offset) {
            self.read_part(block, part, at, &mut flights)?;
        }
        Ok(())
    }

    fn read_part(
        self: &Arc<Self>,
        block: u64,
        part: &mut [u8],
        at: usize,
        flights: &mut HashMap<u64, Boarded>,
    ) -> io::Result<()> {
        // A block may go between being here and being read, over and over: then what its flight brought is taken.
        let mut again = false;
        loop {
            let flight = flights.remove(&block);
            if let Some(Boarded { flight, joined }) = flight {
                let bytes = match flight.wait() {
                    // It was asked before we came: what the source refused then it may give now.
                    Err(failure) if joined && !again && !matches!(failure, Failure::Unreachable(_)) => {
                        again = true;
                        flights.extend(self.start(block..block + 1, Priority::Foreground));
                        continue;
                    }
                    landed => landed?,
                };
                let from = bytes.get(at..at + part.len()).ok_or(io::ErrorKind::UnexpectedEof)?;
                part.copy_from_slice(from);
                return Ok(());
            }
            if self.stored.read(block, part, at) {
                self.common.counters.hits.add(1);
                return Ok(());
            }
            flights.extend(self.start(block..block + 1, Priority::Foreground));
        }
    }

    /// The same without any wait.
    ///
    /// # Errors
    /// As [`Object::read`].
    pub fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        self.blocks_of(buf.len(), offset)?;
        for (block, part, at) in parts(buf, offset) {
            if !self.stored.read_now(block, part, at) {
                return Ok(Answer::WouldWait);
            }
        }
        self.common.counters.hits.add(1);
        Ok(Answer::Done)
    }

    /// Begins to fetch the blocks of a range of bytes that somebody is about to read.
    pub fn expect(self: &Arc<Self>, offset: u64, length: u64) {
        let end = offset.saturating_add(length).min(self.remote.size_bytes);
        if offset < end {
            drop(self.start(offset / BLOCK_BYTES..end.div_ceil(BLOCK_BYTES), Priority::Foreground));
        }
    }

    /// Bytes of the range that came from here were wrong: what is kept of them goes, and is fetched again.
    pub fn distrust(&self, range: Range<u64>) {
        let blocks = range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES).min(self.blocks());
        let mut flights = self.flights();
        for block in blocks.clone() {
            if let Some(flight) = flights.remove(&block) {
                flight.make_void();
            }
        }
        drop(flights);
        self.stored.forget(blocks);
        self.common.counters.distrusted.add(1);
    }

    /// What is here is not what its digest says: all of it goes, and nothing is read until it is added again.
    pub fn condemn(&self) {
        *self.condemned.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.distrust(0..self.remote.size_bytes);
    }

    pub fn pardon(&self) {
        *self.condemned.lock().unwrap_or_else(PoisonError::into_inner) = false;
    }

    fn check_condemned(&self) -> Result<(), Failure> {
        if *self.condemned.lock().unwrap_or_else(PoisonError::into_inner) {
            return Err(Failure::Corrupt(format!("layer {} is not what its digest says", self.name)));
        }
        Ok(())
    }

    /// The flights of those of *blocks* that are not here, new ones and others.
    pub(super) fn start(self: &Arc<Self>, blocks: Range<u64>, priority: Priority) -> HashMap<u64, Boarded> {
        let (mut all, mut runs) = (HashMap::new(), Vec::<Vec<(u64, Arc<Flight>)>>::new());
        let counters = &self.common.counters;
        let mut flights = self.flights();
        for block in blocks {
            // A flight first: its block may be kept and its flight not yet taken off, but never neither.
            if let Some(flight) = flights.get(&block) {
                counters.joined.add(1);
                all.insert(block, Boarded { flight: Arc::clone(flight), joined: true });
            } else if !self.stored.has(block) {
                counters.missed.add(1);
                let flight = Arc::<Flight>::default();
                flights.insert(block, Arc::clone(&flight));
                all.insert(block, Boarded { flight: Arc::clone(&flight), joined: false });
                let last = runs.last_mut().filter(|run| run.last().is_some_and(|(before, _)| before + 1 == block));
                match last.filter(|run| (run.len() as u64) < MAX_RUN) {
                    Some(run) => run.push((block, flight)),
                    None => runs.push(vec![(block, flight)]),
                }
            }
        }
        drop(flights);
        for run in runs {
            let pass = self.common.gate.enter(priority);
            self.common.web.spawn(bring(Landing::new(Arc::clone(self), run), pass));
        }
        all
    }

    fn look_ahead(self: &Arc<Self>, read: &Range<u64>) {
        let guess = self.ahead.lock().unwrap_or_else(PoisonError::into_inner).see(read, self.blocks());
        if !guess.is_empty() && self.flights().len() < MAX_GUESSED {
            self.common.counters.guessed.add(guess.end - guess.start);
            drop(self.start(guess, Priority::Ahead));
        }
    }

    /// A block has been kept, or will not be.
    pub fn landed(&self, block: u64, flight: &Arc<Flight>) {
        let mut flights = self.flights();
        if flights.get(&block).is_some_and(|current| Arc::ptr_eq(current, flight)) {
            flights.remove(&block);
        }
    }

    fn flights(&self) -> MutexGuard<'_, HashMap<u64, Arc<Flight>>> {
        self.flights.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn blocks_of(&self, length: usize, offset: u64) -> io::Result<Range<u64>> {
        let end = offset.checked_add(length as u64).filter(|end| *end <= self.remote.size_bytes);
        let end = end.ok_or(io::ErrorKind::UnexpectedEof)?;
        Ok(offset / BLOCK_BYTES..if length == 0 { offset / BLOCK_BYTES } else { end.div_ceil(BLOCK_BYTES) })
    }

    /// Whether *bytes* are those of *block*, as far as anything says so.
    fn check_block(&self, block: u64, bytes: &[u8]) -> Result<(), Failure> {
        let Some(sums) = &self.remote.block_sums else { return Ok(()) };
        if sums.of(block) == Some(Sha256::digest(bytes).as_slice()) {
            return Ok(());
        }
        Err(Failure::Corrupt(format!("block {block} is not what its sum says")))
    }

    /// Without sums, bytes of two contents would not be told apart.
    fn check_validator(&self, validator: Option<&str>) -> Result<(), Failure> {
        // A registry names content by its digest, and the hosts that it sends us to name it as they please.
        let by_digest = matches!(self.remote.source, super::source::Source::Oci { .. });
        let (None, false, Some(now)) = (&self.remote.block_sums, by_digest, validator) else { return Ok(()) };
        match self.stored.validator() {
            Some(before) if before == now => Ok(()),
            Some(_) if self.stored.blocks_there() > 0 => Err(Failure::Corrupt("the content has changed".into())),
            _ => {
                self.stored.set_validator(Some(now.to_owned()));
                Ok(())
            }
        }
    }
}

impl SharedObject {
    /// Begins to fetch *blocks* when it is their turn. False when there is no need any more.
    pub fn fetch(&self, blocks: Range<u64>, given_up: impl Fn() -> bool) -> bool {
        if !self.0.common.gate.wait_replay(given_up) {
            return false;
        }
        drop(self.0.start(blocks, Priority::Replay));
        true
    }

    /// The blocks that bytes of the file are in.
    pub fn blocks(&self, bytes: &Range<u64>) -> Range<u64> {
        bytes.start / BLOCK_BYTES..bytes.end.div_ceil(BLOCK_BYTES).min(self.0.blocks())
    }
}

/// A flight, and whether it was there before us.
pub(super) struct Boarded {
    pub(super) flight: Arc<Flight>,
    joined: bool,
}

/// *buf* by the blocks that its parts are in: block, part, and place in the block.
fn parts(buf: &mut [u8], offset: u64) -> impl Iterator<Item = (u64, &mut [u8], usize)> {
    let mut rest = buf;
    let mut offset = offset;
    std::iter::from_fn(move || {
        let at = usize::try_from(offset % BLOCK_BYTES).ok()?;
        let length = rest.len().min(usize::try_from(BLOCK_BYTES).ok()? - at);
        let (part, behind) = std::mem::take(&mut rest).split_at_mut(length);
        rest = behind;
        let block = offset / BLOCK_BYTES;
        offset += length as u64;
        (length > 0).then_some((block, part, at))
    })
}

/// Brings what a run of flights is for.
async fn bring(mut landing: Landing, _pass: Pass) {
    let object = Arc::clone(&landing.object);
    let web = &object.common.web;
    let late = || Failure::Unreachable("too many other requests to the same host".into());
    let turn = tokio::time::timeout(web.patience.progress, web.turn(object.target.host())).await;
    let brought = match turn {
        Ok(Some(_turn)) => {
            let blocks = landing.range();
            fetch::run(web, object.as_ref(), &mut landing, blocks, object.remote.size_bytes).await
        }
        _ => Err(late()),
    };
    if let Err(failure) = brought {
        let failure = failure.of(&format!("layer {}", object.name));
        eprintln!("storaged: {failure}");
        landing.fail(&failure);
    }
}

impl fetch::From for Object {
    async fn ask(&self, asked: &Range<u64>) -> Result<(Stream, Option<String>), Refusal> {
        self.common.counters.requests.add(1);
        let answer = self.target.ask(&self.common.web, asked, self.remote.size_bytes).await?;
        Ok((Stream { length: answer.promise.length, response: answer.response }, answer.promise.validator))
    }

    fn may_be_let_in(&self) -> bool {
        self.inherited && !self.target.has_credentials(&self.common.web)
    }
}

/// Flights that are on their way together. Whatever happens to whoever flies them, all of them land.
struct Landing {
    object: Arc<Object>,
    /// Those that have not landed, next one last.
    flights: Vec<(u64, Arc<Flight>)>,
}

impl Landing {
    fn new(object: Arc<Object>, mut flights: Vec<(u64, Arc<Flight>)>) -> Self {
        flights.reverse();
        Self { object, flights }
    }

    fn range(&self) -> Range<u64> {
        match (self.flights.last(), self.flights.first()) {
            (Some((first, _)), Some((last, _))) => *first..last + 1,
            _ => 0..0,
        }
    }

    fn fail(&mut self, failure: &Failure) {
        for (block, flight) in self.flights.drain(..) {
            // Taken off first, so that whoever hears of the failure and tries again starts anew.
            self.object.landed(block, &flight);
            flight.land(Landed::Err(failure.clone()));
        }
    }
}

impl Sink for Landing {
    fn begin(&mut self, validator: Option<&str>) -> Result<(), Failure> {
        self.object.check_validator(validator)
    }

    fn block(&mut self, block: u64, bytes: Vec<u8>) -> Result<(), Failure> {
        self.object.check_block(block, &bytes)?;
        let Some((next, flight)) = self.flights.pop() else { return Ok(()) };
        debug_assert_eq!(next, block);
        let object = Arc::clone(&self.object);
        object.common.counters.fetched_bytes.add(bytes.len() as u64);
        let bytes = Arc::new(bytes);
        flight.land(Ok(Arc::clone(&bytes)));
        let keep = Keep { object, block, bytes, flight };
        // The disk is behind: then this block is read and not kept.
        if let Err(error) = self.object.common.keeping.try_send(keep) {
            let (std::sync::mpsc::TrySendError::Full(keep) | std::sync::mpsc::TrySendError::Disconnected(keep)) = error;
            self.object.common.counters.behind.add(1);
            keep.object.landed(keep.block, &keep.flight);
        }
        Ok(())
    }

    fn failed(&mut self, failure: &Failure) {
        self.object.common.counters.failed(failure);
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        self.fail(&Failure::Unreachable("the daemon is ending".into()));
    }
}

/// A file that is shared: what a layer is read through.
#[derive(Clone)]
pub struct SharedObject(pub Arc<Object>);

impl ReadAt for SharedObject {
    fn size(&self) -> io::Result<u64> {
        Ok(self.0.remote.size_bytes)
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.0.read(buf, offset)
    }
}
