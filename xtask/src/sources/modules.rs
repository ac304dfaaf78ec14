//! The modules of a crate, parsed: which file each is in, what it defines and what it imports.

use anyhow::{Context as _, Result, anyhow};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use syn::{Attribute, Item, ItemMod, UseTree};

/// A module's path from the crate's root, which is the empty one.
pub type Name = Vec<String>;

/// One leaf of a `use`, or a path in the code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Use {
    /// The segments; the last is `*` for all names.
    pub path: Vec<String>,
    /// The name under which it is imported.
    pub name: String,
}

/// One module, of a file or inside of one.
pub struct Module {
    /// The file that it is in.
    pub file: PathBuf,
    /// The names that it defines, modules left out.
    pub defined: BTreeSet<String>,
    /// What it imports.
    pub uses: Vec<Use>,
    /// Its items without tests and inner modules.
    pub items: Vec<Item>,
}

/// A crate's modules by their paths.
pub type Modules = BTreeMap<Name, Module>;

/// Reads the modules of the crate whose sources are in `src`; modules for tests are left out.
pub fn read(src: &Path) -> Result<Modules> {
    let root = ["lib.rs", "main.rs"].map(|name| src.join(name));
    let root = root.iter().find(|path| path.is_file());
    let root = root.ok_or_else(|| anyhow!("{} has no root", src.display()))?;
    let mut modules = Modules::new();
    read_file(root, src, Name::new(), &mut modules)?;
    Ok(modules)
}

/// Reads the module `name` from its file. `folder`: where the files of its inner modules are.
fn read_file(file: &Path, folder: &Path, name: Name, modules: &mut Modules) -> Result<()> {
    let shown = || file.display().to_string();
    let text = fs::read_to_string(file).with_context(shown)?;
    let parsed = syn::parse_file(&text).with_context(shown)?;
    take(parsed.items, file, folder, name, modules)
}

fn take(
    items: Vec<Item>,
    file: &Path,
    folder: &Path,
    name: Name,
    modules: &mut Modules,
) -> Result<()> {
    let mut module = Module {
        file: file.to_owned(),
        defined: BTreeSet::new(),
        uses: Vec::new(),
        items: Vec::new(),
    };
    for item in items {
        match item {
            Item::Mod(inner) if !is_test(&inner.attrs) => {
                take_module(inner, file, folder, &name, modules)?;
            }
            Item::Mod(_) => {}
            Item::Use(item) => leaves(&item.tree, &mut Vec::new(), &mut module.uses),
            item => {
                if let Some(defined) = defines(&item) {
                    module.defined.insert(defined);
                }
                module.items.push(item);
            }
        }
    }
    modules.insert(name, module);
    Ok(())
}

fn take_module(
    inner: ItemMod,
    file: &Path,
    folder: &Path,
    above: &Name,
    modules: &mut Modules,
) -> Result<()> {
    let ident = inner.ident.to_string();
    let folder = folder.join(&ident);
    let mut name = above.clone();
    name.push(ident);
    if let Some((_, items)) = inner.content {
        return take(items, file, &folder, name, modules);
    }
    // A module of another crate's tests needs none of this one's files.
    if inner.attrs.iter().any(|attribute| attribute.path().is_ident("path")) {
        return Ok(());
    }
    let files = [folder.with_extension("rs"), folder.join("mod.rs")];
    let found = files.iter().find(|path| path.is_file());
    let found = found.ok_or_else(|| anyhow!("{} has no file", folder.display()))?;
    read_file(found, &folder, name, modules)
}

/// Whether an item is there for tests alone.
pub fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let condition = attribute.path().is_ident("cfg").then(|| attribute.parse_args());
        matches!(condition, Some(Ok(syn::Meta::Path(path))) if path.is_ident("test"))
    })
}

fn defines(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Macro(item) => item.ident.as_ref()?,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.to_string())
}

fn leaves(tree: &UseTree, above: &mut Vec<String>, uses: &mut Vec<Use>) {
    let mut leaf = |last: String, name: String| {
        let mut path = above.clone();
        path.push(last);
        uses.push(Use { path, name });
    };
    match tree {
        UseTree::Path(path) => {
            above.push(path.ident.to_string());
            leaves(&path.tree, above, uses);
            above.pop();
        }
        UseTree::Group(group) => group.items.iter().for_each(|tree| leaves(tree, above, uses)),
        UseTree::Name(name) => leaf(name.ident.to_string(), name.ident.to_string()),
        UseTree::Rename(rename) => leaf(rename.ident.to_string(), rename.rename.to_string()),
        UseTree::Glob(_) => leaf("*".to_owned(), "*".to_owned()),
    }
}
