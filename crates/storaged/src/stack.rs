//! A stack of layers as one thing to read from, at the price of a few lookups however many they are.
//!
//! The layers of a stack are joined in tiers. Each tier has one merged index, and is more than twice as large
//! as the one above it, so there are few. A tier is shared by every stack that has it: a thousand disks
//! on one template, each with small layers of its own, keep one large index and a thousand small ones.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use layers::{Index, Place, SECTOR, merge};

use crate::device::Answer;
use crate::error::{Code, Error, Result};
use crate::keyed::Keyed;
use crate::layer::{LayerFile, MAX_SIZE_BYTES, worded};
use crate::library::Library;
use crate::merged::Merged;
use crate::names::LayerName;
use crate::protocol::Stack;
use crate::reading::{self, Caching, Part, split};

/// More than a sane chain has; bounds what one attachment may cost.
pub const MAX_LAYERS: usize = 1024;
/// Sizes of layers that are remembered, so that they need not be looked up again; about 100 bytes each.
const MAX_REMEMBERED: usize = 100_000;

/// Some layers that lie on one another in some stack.
struct Tier {
    /// Newest first, as tags count.
    layers: Vec<Arc<LayerFile>>,
    index: Index,
}

/// What a stack shows. Immutable; cheap to keep, since its tiers are shared.
#[derive(Clone)]
pub struct View {
    /// Newest first.
    tiers: Vec<Arc<Tier>>,
    pub size_bytes: u64,
    /// For a memory image, which keeps what it reads in pages of its own.
    image: Option<Arc<CountedImage>>,
    /// Copies that are read instead of what the stack lists, and stay meanwhile.
    _merged: Vec<Arc<Merged>>,
}

/// Sectors that a view maps, all in the same way.
pub struct Run {
    pub sectors: Range<u64>,
    pub zeroed: bool,
}

/// Each of the layers counts as many memory images as there are of these.
struct CountedImage(Vec<Arc<LayerFile>>);

/// All stacks that are in use.
pub struct Stacks {
    library: Arc<Library>,
    tiers: Mutex<HashMap<Vec<LayerName>, Weak<Tier>>>,
    loading: Keyed<Vec<LayerName>>,
    /// Mappings in each layer.
    counts: Mutex<HashMap<LayerName, u64>>,
}

impl Stacks {
    pub fn new(library: &Arc<Library>) -> Self {
        Self {
            library: Arc::clone(library),
            tiers: Mutex::default(),
            loading: Keyed::default(),
            counts: Mutex::default(),
        }
    }

    /// Opens *stack*, whose layers are held.
    ///
    /// # Errors
    /// `corrupt` and `unsupported` for a layer that cannot be read, `not_found` for one that is not there,
    /// `invalid` for a stack that cannot be.
    pub fn open(&self, stack: &Stack) -> Result<View> {
        check(stack)?;
        let copies = self.library.merges();
        let steps = copies.steps(&stack.layers);
        let names: Vec<_> = steps.iter().map(|step| step.name.clone()).collect();
        let merged: Vec<_> = steps.into_iter().filter_map(|step| step.merged).collect();
        match self.open_names(&names, stack.size_bytes) {
            // The layers themselves may be good.
            Err(error) if !merged.is_empty() && matches!(error.code, Code::Corrupt | Code::NotFound) => {
                eprintln!("storaged: merged layers are not used: {error}");
                for one in &merged {
                    copies.discard(&one.name);
                }
                self.open_names(&stack.layers, stack.size_bytes)
            }
            other => Ok(View { _merged: merged, ..other? }),
        }
    }

    /// Opens just these layers, which are held.
    ///
    /// # Errors
    /// As [`Stacks::open`].
    pub fn open_names(&self, names: &[LayerName], size_bytes: u64) -> Result<View> {
        let counts = names.iter().map(|name| self.count(name)).collect::<Result<Vec<_>>>()?;
        let mut tiers = Vec::new();
        for group in groups(&counts).into_iter().rev() {
            tiers.push(self.tier(&names[group])?);
        }
        let view = View { tiers, size_bytes, image: None, _merged: Vec::new() };
        if let Some(layer) = view.layers().find(|layer| layer.size_bytes > size_bytes) {
            let message = format!("layer {} is larger than the stack's {size_bytes} bytes", layer.name());
            return Err(Error::invalid(message));
        }
        Ok(view)
    }

    /// How many mappings *name* says it has.
    fn count(&self, name: &LayerName) -> Result<u64> {
        let counts = || self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts().get(name) {
            return Ok(*count);
        }
        let count = LayerFile::count(name, self.library.content(name)?)?;
        let mut counts = counts();
        if counts.len() >= MAX_REMEMBERED {
            counts.clear();
        }
        counts.insert(name.clone(), count);
        Ok(count)
    }

    fn tier(&self, names: &[LayerName]) -> Result<Arc<Tier>> {
        let key = names.to_vec();
        let _turn = self.loading.lock(&key);
        if let Some(tier) = self.known().get(&key).and_then(Weak::upgrade) {
            return Ok(tier);
        }
        let (mut layers, mut indexes) = (Vec::new(), Vec::new());
        for name in names {
            let (layer, index) = LayerFile::open(name.clone(), &self.library.content(name)?)?;
            layers.push(layer);
            indexes.push(index);
        }
        let index = match <[Index; 1]>::try_from(indexes) {
            Ok([index]) => index,
            Err(indexes) => {
                let everything = MAX_SIZE_BYTES / SECTOR;
                merge(&indexes.iter().collect::<Vec<_>>(), everything).map_err(|e| worded("a stack", e))?
            }
        };
        layers.reverse();
        let tier = Arc::new(Tier { layers, index });
        let mut known = self.known();
        known.retain(|_, tier| tier.strong_count() > 0);
        known.insert(key, Arc::downgrade(&tier));
        Ok(tier)
    }

    /// Memory that all indexes take, in bytes.
    pub fn memory_bytes(&self) -> usize {
        self.known().values().filter_map(Weak::upgrade).map(|tier| tier.index.memory_bytes()).sum()
    }

    fn known(&self) -> MutexGuard<'_, HashMap<Vec<LayerName>, Weak<Tier>>> {
        self.tiers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether such a stack can be at all.
///
/// # Errors
/// `invalid` if not.
pub fn check(stack: &Stack) -> Result<()> {
    let size = stack.size_bytes;
    if size == 0 || size > MAX_SIZE_BYTES || size % SECTOR != 0 {
        return Err(Error::invalid(format!("a stack of {size} bytes")));
    }
    if stack.layers.len() > MAX_LAYERS {
        return Err(Error::invalid(format!("a stack of {} layers; {MAX_LAYERS} are the most", stack.layers.len())));
    }
    Ok(())
}

/// Which of the layers, lowest first and so large, are one tier.
fn groups(counts: &[u64]) -> Vec<Range<usize>> {
    let mut groups: Vec<(Range<usize>, u64)> = Vec::new();
    for (at, &count) in counts.iter().enumerate() {
        groups.push((at..at + 1, count.max(1)));
        while let [.., (below, size_below), (above, size_above)] = groups.as_slice() {
            if 2 * size_above < *size_below || above.end - below.start > layers::MAX_LAYERS {
                break;
            }
            let joined = (below.start..above.end, size_below + size_above);
            groups.truncate(groups.len() - 2);
            groups.push(joined);
        }
    }
    groups.into_iter().map(|(range, _)| range).collect()
}

impl View {
    /// The same layers, in a view of another size.
    #[must_use]
    pub fn resized(&self, size_bytes: u64) -> Self {
        Self { size_bytes, ..self.clone() }
    }

    pub fn layers(&self) -> impl Iterator<Item = &Arc<LayerFile>> {
        self.tiers.iter().flat_map(|tier| &tier.layers)
    }

    /// The same as a memory image shows it.
    #[must_use]
    pub fn of_image(self) -> Self {
        let layers: Vec<_> = self.layers().cloned().collect();
        for layer in &layers {
            layer.count_image(true);
        }
        Self { image: Some(Arc::new(CountedImage(layers))), ..self }
    }

    /// Fills *buf* from byte *offset* on; sectors that nothing maps are zeros.
    ///
    /// # Errors
    /// Whatever reading a layer says.
    pub fn read(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let mut parts = Vec::new();
        self.parts(buf, offset, &mut parts)?;
        reading::read(parts)
    }

    /// The same if it takes no wait for a disk.
    ///
    /// # Errors
    /// As [`View::read`].
    pub fn read_now(&self, buf: &mut [u8], offset: u64) -> io::Result<Answer> {
        let mut parts = Vec::new();
        self.parts(buf, offset, &mut parts)?;
        reading::read_now(parts)
    }

    /// Adds to *found* where the bytes from *offset* on are, and fills in those that are zeros.
    ///
    /// # Errors
    /// None that a range inside of the view gives.
    pub fn parts<'a, 'b>(&'a self, buf: &'b mut [u8], offset: u64, found: &mut Vec<Part<'a, 'b>>) -> io::Result<()> {
        parts(&self.tiers, self.image.is_some(), buf, offset, found)
    }

    /// Where the data of *range*, in sectors, lies: layer, byte of its file, and how many bytes.
    pub fn places(&self, range: Range<u64>, found: &mut impl FnMut(&Arc<LayerFile>, u64, u64)) {
        places(&self.tiers, range, found);
    }

    /// The same for one who reads everything once.
    #[must_use]
    pub fn passing(self) -> Self {
        Self { image: Some(Arc::new(CountedImage(Vec::new()))), ..self }
    }

    /// How many files it is read from.
    pub fn depth(&self) -> usize {
        self.tiers.iter().map(|tier| tier.layers.len()).sum()
    }

    /// The runs of *range*, in sectors, that any layer has data for.
    pub fn data(&self, range: Range<u64>) -> Vec<Range<u64>> {
        self.mapped(range).into_iter().filter(|run| !run.zeroed).map(|run| run.sectors).collect()
    }

    /// The runs of *range*, in sectors, that any layer maps.
    pub fn mapped(&self, range: Range<u64>) -> Vec<Run> {
        let mut found = Vec::new();
        mapped(&self.tiers, range, &mut found);
        found
    }
}

impl Drop for CountedImage {
    fn drop(&mut self) {
        for layer in &self.0 {
            layer.count_image(false);
        }
    }
}

/// Goes through the tiers: what one does not map, the next one may.
fn parts<'a, 'b>(
    tiers: &'a [Arc<Tier>],
    of_image: bool,
    buf: &'b mut [u8],
    offset: u64,
    found: &mut Vec<Part<'a, 'b>>,
) -> io::Result<()> {
    let Some((tier, lower)) = tiers.split_first() else {
        buf.fill(0);
        return Ok(());
    };
    let end = offset + buf.len() as u64;
    let mut rest = buf;
    for piece in tier.index.pieces(offset / SECTOR..end.div_ceil(SECTOR)) {
        let start = offset.max(piece.offset * SECTOR);
        let stop = end.min((piece.offset + piece.length) * SECTOR);
        let (buf, behind) = split(rest, stop - start)?;
        rest = behind;
        match piece.place {
            Place::Zeroed => buf.fill(0),
            Place::Hole => parts(lower, of_image, buf, start, found)?,
            Place::Data { tag, moffset } => {
                let store = &*tier.layers[usize::from(tag)];
                let caching = if of_image { store.caching() } else { Caching::Keep };
                found.push(Part { store, buf, at: moffset * SECTOR + (start - piece.offset * SECTOR), caching });
            }
        }
    }
    Ok(())
}

fn places(tiers: &[Arc<Tier>], range: Range<u64>, found: &mut impl FnMut(&Arc<LayerFile>, u64, u64)) {
    let Some((tier, lower)) = tiers.split_first() else { return };
    for piece in tier.index.pieces(range) {
        match piece.place {
            Place::Zeroed => (),
            Place::Hole => places(lower, piece.range(), found),
            Place::Data { tag, moffset } => {
                found(&tier.layers[usize::from(tag)], moffset * SECTOR, piece.length * SECTOR);
            }
        }
    }
}

fn mapped(tiers: &[Arc<Tier>], range: Range<u64>, found: &mut Vec<Run>) {
    let Some((tier, lower)) = tiers.split_first() else { return };
    for piece in tier.index.pieces(range) {
        if piece.place == Place::Hole {
            mapped(lower, piece.range(), found);
            continue;
        }
        let (sectors, zeroed) = (piece.range(), piece.place == Place::Zeroed);
        match found.last_mut().filter(|last| last.zeroed == zeroed && last.sectors.end == sectors.start) {
            Some(last) => last.sectors.end = sectors.end,
            None => found.push(Run { sectors, zeroed }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_base_stays_apart_from_small_layers_above_it() {
        assert_eq!(groups(&[1000, 5, 5]), [0..1, 1..3]);
        assert_eq!(groups(&[1000, 600]).as_slice(), std::slice::from_ref(&(0..2)));
        assert_eq!(groups(&[]), Vec::<Range<usize>>::new());
    }

    #[test]
    fn tiers_are_few_and_never_of_more_layers_than_tags() {
        assert!(groups(&vec![7; 1000]).len() <= 10);
        assert!(groups(&vec![0; 1000]).iter().all(|group| group.len() <= layers::MAX_LAYERS));
    }

    #[test]
    fn the_bytes_of_memory_and_of_nothing_are_no_stack() {
        for size_bytes in [0, 1, 513, u64::MAX, MAX_SIZE_BYTES + 512] {
            assert!(check(&Stack { layers: Vec::new(), size_bytes }).is_err(), "{size_bytes}");
        }
    }
}
