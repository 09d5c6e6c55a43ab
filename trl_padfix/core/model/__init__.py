"""Facts about models read from their modules, and the patches and views through which packed forwards run."""
