//! A writable layer in memory: what a daemon does with files, in the least code.

use layers::{Header, Identity, Limits, Map, Origin, Overlay, Place, ReadAt, SECTOR, Segment, Stack, log, seal};

pub(crate) struct Upper {
    pub(crate) identity: Identity,
    pub(crate) data: Vec<u8>,
    pub(crate) log: Vec<u8>,
    pub(crate) map: Map,
}

#[allow(dead_code, reason = "not every suite does everything")]
impl Upper {
    pub(crate) fn new(identity: Identity, map: Map) -> Self {
        let data = Header::of_upper(identity.clone()).encode().unwrap().to_vec();
        let log = Header::of_log(identity.clone()).encode().unwrap().to_vec();
        Self { identity, data, log, map }
    }

    fn end(&self) -> u64 {
        self.data.len() as u64 / SECTOR
    }

    fn enter(&mut self, segment: Segment) {
        self.log.extend_from_slice(&segment.encode());
        self.map.insert(segment, |_| ());
    }

    /// Appends, as a log-structured upper does.
    pub(crate) fn write(&mut self, offset: u64, bytes: &[u8]) {
        let run = Segment::run_of_data(offset / SECTOR, bytes.len() as u64 / SECTOR, self.end()).unwrap();
        self.data.extend_from_slice(bytes);
        run.for_each(|segment| self.enter(segment));
    }

    /// Overwrites what is mapped and appends the rest, as a hybrid one does.
    pub(crate) fn write_in_place(&mut self, offset: u64, bytes: &[u8]) {
        let start = offset / SECTOR;
        let pieces: Vec<_> = self.map.pieces(start..start + bytes.len() as u64 / SECTOR).collect();
        for piece in pieces {
            let part = &bytes[word((piece.offset - start) * SECTOR)..][..word(piece.length * SECTOR)];
            match piece.place {
                Place::Data { moffset, .. } => {
                    self.data[word(moffset * SECTOR)..][..part.len()].copy_from_slice(part);
                }
                Place::Hole | Place::Zeroed => self.write(piece.offset * SECTOR, part),
            }
        }
    }

    pub(crate) fn discard(&mut self, offset: u64, length: u64) {
        let run = Segment::run_of_zeros(offset / SECTOR, length / SECTOR, self.end()).unwrap();
        run.for_each(|segment| self.enter(segment));
    }

    /// The map as a restart finds it.
    pub(crate) fn replayed(&self, map: Map) -> log::Replay {
        log::replay(&self.log, self.data.len() as u64, map, Limits::default()).unwrap()
    }

    pub(crate) fn sealed(mut self) -> Vec<u8> {
        let end = self.data.len() as u64;
        let written = seal(&mut self.data, &self.identity, &self.map, end).unwrap();
        assert_eq!(written.file_bytes, self.data.len() as u64);
        self.data
    }

    /// What a guest would read.
    pub(crate) fn view<S: ReadAt>(&self, below: Option<&Stack<S>>) -> Vec<u8> {
        let empty = layers::Index::default();
        let lower = below.map_or(&empty, |stack| stack.index());
        let sectors = self.identity.virtual_size / SECTOR;
        let mut view = Vec::new();
        for (origin, piece) in (Overlay { upper: &self.map, lower }).pieces(0..sectors) {
            assert_eq!(piece.offset * SECTOR, view.len() as u64, "no gap, no overlap");
            let from = view.len();
            view.resize(from + word(piece.length * SECTOR), 0);
            match (origin, piece.place) {
                (_, Place::Hole | Place::Zeroed) => (),
                (Origin::Upper, Place::Data { moffset, .. }) => {
                    self.data.read_exact_at(&mut view[from..], moffset * SECTOR).unwrap();
                }
                (Origin::Lower, Place::Data { tag, moffset }) => {
                    let source = below.and_then(|stack| stack.source(tag)).unwrap();
                    source.read_exact_at(&mut view[from..], moffset * SECTOR).unwrap();
                }
            }
        }
        view
    }
}

fn word(value: u64) -> usize {
    usize::try_from(value).unwrap()
}
