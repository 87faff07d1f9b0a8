//! Sealed layers on one another, and the view they give.

use std::io;

use crate::error::{Invalid, Result};
use crate::header::Identity;
use crate::index::Index;
use crate::layer::{Layer, read_view};
use crate::merge::{merge, with_layer};
use crate::source::ReadAt;
use crate::{MAX_LAYERS, SECTOR};

/// One to [`MAX_LAYERS`] layers with their merged index. As a [`ReadAt`] it is what they show
/// together. Its size is that of the newest; a disk that was enlarged has smaller layers below.
#[derive(Debug, Clone)]
pub struct Stack<S> {
    /// Newest first, as tags count.
    sources: Vec<S>,
    identities: Vec<Identity>,
    index: Index,
}

impl<S: ReadAt> Stack<S> {
    /// Joins *layers*, lowest first.
    ///
    /// # Errors
    /// Invalid for none or too many.
    pub fn new(layers: Vec<Layer<S>>) -> Result<Self> {
        let Some(newest) = layers.last().filter(|_| layers.len() <= MAX_LAYERS) else {
            return Err(Invalid::Layers(layers.len()).into());
        };
        let virtual_sectors = newest.identity().virtual_size / SECTOR;
        let index = merge(&layers.iter().map(Layer::index).collect::<Vec<_>>(), virtual_sectors)?;
        let parts = layers.into_iter().rev().map(Layer::into_parts);
        let (sources, identities) = parts.map(|(source, identity, _)| (source, identity)).unzip();
        Ok(Self { sources, identities, index })
    }

    /// This stack with *layer* on it, for an upper that was sealed while it is used: what is below
    /// is not read again.
    ///
    /// # Errors
    /// Invalid if the stack is full.
    pub fn with_layer(&self, layer: Layer<S>) -> Result<Self>
    where
        S: Clone,
    {
        if self.sources.len() >= MAX_LAYERS {
            return Err(Invalid::Layers(self.sources.len() + 1).into());
        }
        let index = with_layer(&self.index, layer.index(), layer.identity().virtual_size / SECTOR);
        let (source, identity, _) = layer.into_parts();
        let sources = std::iter::once(source).chain(self.sources.iter().cloned()).collect();
        let identities = std::iter::once(identity).chain(self.identities.iter().cloned()).collect();
        Ok(Self { sources, identities, index })
    }

    /// The merged mappings, each with the tag of its layer.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// In bytes, that of the newest layer.
    pub fn virtual_size(&self) -> u64 {
        self.identities[0].virtual_size
    }

    /// The layers, newest first: *tag* is the place in it.
    pub fn identities(&self) -> &[Identity] {
        &self.identities
    }

    /// The file of layer *tag*.
    pub fn source(&self, tag: u8) -> Option<&S> {
        self.sources.get(usize::from(tag))
    }

    /// Reads from the file of the layer with *tag*, at a byte of that file.
    pub(crate) fn read_data(&self, tag: u8, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.sources[usize::from(tag)].read_exact_at(buf, offset)
    }
}

impl<S: ReadAt> ReadAt for Stack<S> {
    fn size(&self) -> io::Result<u64> {
        Ok(self.virtual_size())
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        read_view(&self.index, self.virtual_size(), buf, offset, |tag, buf, at| self.read_data(tag, buf, at))
    }
}
