from resformer.cli import main

if __name__ == "__main__":
    main()
