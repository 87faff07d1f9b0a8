//! The processes that are alive, by pid and by tag.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;

use wire::RpcError;
use wire::process::{Selector, Signal};

use super::broadcast::Budget;
use super::running::Process;

#[derive(Default)]
pub(crate) struct Registry {
    by_pid: RefCell<BTreeMap<u32, Rc<Process>>>,
    pub(super) budget: Rc<Budget>,
}

impl Registry {
    pub(crate) fn count(&self) -> usize {
        self.by_pid.borrow().len()
    }

    pub(super) fn add(&self, process: Rc<Process>) {
        self.by_pid.borrow_mut().insert(process.pid, process);
    }

    pub(super) fn remove(&self, pid: u32) {
        self.by_pid.borrow_mut().remove(&pid);
    }

    /// Kills every process with all it ever started, as far as that can be known.
    pub(crate) fn kill_all(&self) {
        for process in self.all() {
            let _ = process.signal(Signal::Kill, true);
        }
    }

    pub(super) fn all(&self) -> Vec<Rc<Process>> {
        self.by_pid.borrow().values().cloned().collect()
    }

    /// # Errors
    /// `not_found` when no live process of ours is meant.
    pub(super) fn find(&self, selector: &Selector) -> Result<Rc<Process>, RpcError> {
        let processes = self.by_pid.borrow();
        let found = match selector {
            Selector::Pid(pid) => processes.get(pid),
            Selector::Tag(tag) => processes.values().find(|p| p.tag.as_deref() == Some(tag)),
        };
        found.cloned().ok_or_else(|| match selector {
            Selector::Pid(pid) => RpcError::not_found(format!("process with pid {pid} not found")),
            Selector::Tag(tag) => RpcError::not_found(format!("process with tag {tag} not found")),
        })
    }
}
